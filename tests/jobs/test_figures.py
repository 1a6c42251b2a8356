"""Time per token, spreads, accepted length and tables, with literal numbers."""

import pytest

from jobs.figures import Spread, Timing, accepted_length, table


@pytest.mark.parametrize(
    ("timing", "tpot_ms"),
    [
        (Timing(5, 0.5, 2.5), 500.0),
        (Timing(2, 1.0, 1.25), 250.0),
        (Timing(1, 1.0, 1.0), None),
        (Timing(4, None, 1.0), None),
        (Timing(0, None, None), None),
    ],
)
def test_the_first_token_is_not_part_of_the_time_per_token(timing: Timing, tpot_ms: float | None) -> None:
    assert timing.tpot_ms == tpot_ms


def test_a_spread_is_of_what_is_known() -> None:
    assert Spread.of([1.0, None, 3.0, 2.0]) == Spread(2.0, 2.9)
    assert Spread.of([4.0]) == Spread(4.0, 4.0)
    assert Spread.of([None]) is None


def test_passes_without_a_draft_are_no_draft_of_length_0() -> None:
    assert accepted_length(accepted=6, rounds=5, drafts_empty=1) == 1.5
    assert accepted_length(accepted=0, rounds=5, drafts_empty=5) == 0.0


def test_a_table_leaves_out_what_nobody_knows() -> None:
    rows = [{"name": "a", "x": 1.5, "y": None, "z": 0}, {"name": "long", "x": None, "y": None, "z": 10}]
    assert table(rows).splitlines() == ["name  x    z", "a     1.5  0", "long  -    10"]
