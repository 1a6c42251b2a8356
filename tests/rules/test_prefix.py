"""The one acceptance function and the strict rule on random blocks, ties included."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.rules.prefix import accept_prefix
from serving.rules.strict import StrictRule
from serving.types import ExceptionRecord, Ledger, ScoreTable
from tests.rules.blocks import blocks, table


@given(blocks())
def test_strict_equals_the_plain_loop(scores: ScoreTable) -> None:
    accepted = 0
    while accepted < len(scores.draft_ids) and scores.draft_ids[accepted] == scores.next_ids[accepted]:
        accepted += 1
    verdict = StrictRule().judge(scores, Ledger())
    assert verdict.num_accepted == accepted
    assert verdict.next_id == scores.next_ids[accepted]
    assert verdict.exceptions == ()
    assert len(verdict.tiers) == accepted + 1


@given(blocks())
def test_a_tie_is_a_mismatch_unless_it_is_the_lowest_id(scores: ScoreTable) -> None:
    for index, is_wrong in enumerate(scores.mismatch):
        if scores.draft_ids[index] > scores.next_ids[index]:
            assert is_wrong
        if not is_wrong:
            assert scores.regret[index] == 0.0


@given(blocks(), st.data())
def test_any_mask_accepts_its_own_prefix(scores: ScoreTable, data: st.DataObject) -> None:
    size = len(scores.draft_ids)
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=bool)
    verdict = accept_prefix(scores, keep)
    assert keep[: verdict.num_accepted].all()
    assert verdict.num_accepted == size or not keep[verdict.num_accepted]
    assert verdict.tiers[-1] == ("bonus" if verdict.num_accepted == size else "recovered")


@given(blocks())
def test_strict_tells_which_mismatch_ended_the_block(scores: ScoreTable) -> None:
    verdict = StrictRule().judge(scores, Ledger())
    if verdict.num_accepted == len(scores.draft_ids):
        assert verdict.rejected is None
        assert verdict.seen == ()
        return
    at = verdict.num_accepted
    assert verdict.rejected == ExceptionRecord(
        at, int(scores.draft_ids[at]), int(scores.next_ids[at]), float(scores.regret[at])
    )
    assert verdict.seen == (verdict.rejected,)


@pytest.mark.parametrize("impossible", [-np.inf])
def test_an_impossible_draft_has_infinite_regret(impossible: float) -> None:
    scores = table([1], np.array([[0.0, impossible], [0.0, 1.0]], dtype=np.float32))
    assert scores.regret.tolist() == [np.inf]
