"""The arithmetic of the paired benchmark: order, ratios within a repeat, medians, identity."""

from collections.abc import Iterator

import pytest

from jobs.comparison import Arm, Measured, Run, measure, orders, summarise
from jobs.figures import Spread

IDS = [1, 2]


def arm(*seconds: float, ids: list[int] = IDS) -> list[Measured]:
    return [Measured(s, [ids], [1000.0 * s], accepted_length=1.5, target_passes_per_token=0.5) for s in seconds]


def by_name(runs: list[Run]) -> dict[str, Run]:
    return {run.name: run for run in runs}


def test_every_second_repeat_goes_back() -> None:
    assert orders(["a", "b", "c"], 3) == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]


def recorder(ran: list[str], name: str, num_turns: int) -> Arm:
    def turns() -> Iterator[Measured | None]:
        for turn in range(num_turns):
            ran.append(name)
            yield Measured(float(len(ran)), [IDS]) if turn == num_turns - 1 else None

    return Arm(turns)


def test_arms_run_in_that_order_and_keep_their_own_repeats() -> None:
    ran: list[str] = []
    found = measure({name: recorder(ran, name, 1) for name in "ab"}, orders("ab", 2))
    assert ran == ["a", "b", "b", "a"]
    assert {name: [one.seconds for one in repeats] for name, repeats in found.items()} == {"a": [1, 4], "b": [2, 3]}


def test_arms_take_turns_forwards_and_backwards_until_each_has_its_result() -> None:
    ran: list[str] = []
    arms = {"whole": recorder(ran, "w", 1), "a": recorder(ran, "a", 4), "b": recorder(ran, "b", 3)}
    found = measure(arms, orders(list(arms), 1))
    assert "".join(ran) == "wabbaaba"
    assert {name: len(repeats) for name, repeats in found.items()} == {"whole": 1, "a": 1, "b": 1}


def test_ratios_are_taken_within_a_repeat() -> None:
    runs = by_name(
        summarise(
            {
                "generate": arm(2.0, 8.0, 2.0),
                "plain": arm(1.0, 4.0, 1.0),  # the slow minute slowed both
                "suffix": arm(0.5, 1.0, 0.25, ids=[1, 3]),
            }
        )
    )
    assert runs["plain"].ratio_to_generate == 2.0
    assert runs["suffix"].ratio_to_plain == 4.0
    assert runs["suffix"].ratio_to_lookup is None
    assert runs["suffix"].identical_to_plain == 0.0
    assert runs["plain"].identical_to_generate == 1.0
    assert runs["plain"].tokens_per_s == 2.0
    assert runs["plain"].tpot_ms == Spread(1000.0, 3700.0)
    assert runs["plain"].accepted_length == 1.5
    assert [(one.seconds, one.tokens, one.tokens_per_s) for one in runs["suffix"].repeats] == [
        (0.5, 2, 4.0),
        (1.0, 2, 2.0),
        (0.25, 2, 8.0),
    ]


def test_identity_is_over_all_repeats() -> None:
    runs = by_name(summarise({"plain": arm(1.0, 1.0), "suffix": arm(1.0) + arm(1.0, ids=[9])}))
    assert runs["suffix"].identical_to_plain == 0.5


def test_samples_of_another_generator_are_not_compared() -> None:
    repeats = {"generate": arm(1.0, ids=[7, 7]), "plain": arm(1.0), "suffix": arm(1.0)}
    runs = by_name(summarise(repeats, frozenset({"generate"})))
    assert runs["generate"].identical_to_plain is None
    assert runs["suffix"].identical_to_generate is None
    assert runs["suffix"].identical_to_plain == 1.0
    assert runs["suffix"].ratio_to_generate == 1.0


@pytest.mark.parametrize("column", ["vs lookup", "vs assisted"])
def test_a_row_has_every_column(column: str) -> None:
    (run,) = summarise({"plain": arm(0.5)})
    assert run.row[column] is None
    assert (run.row["tokens/s"], run.row["TPOT ms"], run.row["= plain"]) == (4.0, 500.0, 1.0)
