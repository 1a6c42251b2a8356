"""The arithmetic of the benchmark: medians, ratios within a repeat, identity."""

from jobs.bench import Measured, summarise


def test_ratios_are_taken_within_a_repeat() -> None:
    def arm(*seconds: float, ids: list[int]) -> list[Measured]:
        return [Measured(s, [ids], {"accepted_length": 1.5}) for s in seconds]

    repeats = {
        "generate": arm(2.0, 8.0, 2.0, ids=[1, 2]),
        "plain": arm(1.0, 4.0, 1.0, ids=[1, 2]),  # the slow minute slowed both
        "suffix": arm(0.5, 1.0, 0.25, ids=[1, 3]),
    }
    rows = {row["name"]: row for row in summarise(repeats)}
    assert rows["plain"]["ratio_to_generate"] == 2.0
    assert rows["suffix"]["ratio_to_plain"] == 4.0
    assert rows["suffix"]["ratio_to_lookup"] is None
    assert rows["suffix"]["identical_to_plain"] == 0.0
    assert rows["plain"]["identical_to_generate"] == 1.0
    assert rows["plain"]["tokens_per_s"] == 2.0
    assert [len(row["repeats"]) for row in rows.values()] == [3, 3, 3]
