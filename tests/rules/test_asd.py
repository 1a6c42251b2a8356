"""ASD on random blocks with ties: the vectorised rule against the loop of the paper, and its properties."""

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.rules.asd import AsdRule
from serving.rules.budget import Purse
from serving.rules.strict import StrictRule
from serving.types import Ledger, ScoreTable
from tests.rules.blocks import blocks, some, table

STOPS = frozenset({4})


@st.composite
def rules(draw: st.DrawFn) -> AsdRule:
    budget = some(draw, 0.0, 0.1, 0.5, 1.0, 2.5, 8.0, math.inf)
    gate = some(draw, 0.0, 0.05, 0.1, 0.25, 1.0, 3.0, math.inf)
    q = draw(st.sampled_from(["remaining", "normalised"]))
    purse = Purse(budget, draw(st.integers(0, 4)))
    return AsdRule(
        purse, gate=gate, q=q, q_cap=draw(st.integers(1, 6)), held_ids=draw(st.sampled_from([STOPS, frozenset()]))
    )


ledgers = st.builds(Ledger, st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.4999, 8.0]), st.integers(0, 3))


def q_of(rule: AsdRule, index: int, size: int) -> float:
    remaining = size - index
    return min(remaining / size if rule.q == "normalised" else remaining, rule.q_cap)


def loop(rule: AsdRule, scores: ScoreTable, ledger: Ledger) -> tuple[int, Ledger, bool]:
    """Accepted tokens, the ledger after them, and whether it was the budget that ended the block."""
    run, number, size = ledger.regret_spent, 0, len(scores.draft_ids)
    for index in range(size):
        if scores.draft_ids[index] == scores.next_ids[index]:
            continue
        regret = float(scores.regret[index])
        is_wanted = (
            rule.gate > 0
            and math.isfinite(regret)
            and regret / q_of(rule, index, size) <= rule.gate
            and int(scores.draft_ids[index]) not in rule.held_ids
            and number < rule.purse.max_exceptions
            and rule.purse.budget > 0
        )
        is_affordable = run < rule.purse.budget and run + regret <= rule.purse.budget
        if not (is_wanted and is_affordable):
            return index, Ledger(run, ledger.num_exceptions + number), is_wanted
        run, number = run + regret, number + 1
    return size, Ledger(run, ledger.num_exceptions + number), False


@given(blocks(impossible=True), rules(), ledgers)
def test_vectorised_equals_the_loop_to_the_last_bit(scores: ScoreTable, rule: AsdRule, ledger: Ledger) -> None:
    accepted, after, is_exhausted = loop(rule, scores, ledger)
    verdict = rule.judge(scores, ledger)
    assert verdict.num_accepted == accepted
    assert verdict.next_id == scores.next_ids[accepted]
    assert ledger.charge(verdict.exceptions) == after
    assert verdict.is_exhausted == is_exhausted


@given(blocks(impossible=True), rules(), ledgers)
def test_exceptions_are_the_accepted_mismatches_and_their_regret_is_what_is_spent(
    scores: ScoreTable, rule: AsdRule, ledger: Ledger
) -> None:
    verdict = rule.judge(scores, ledger)
    assert [e.index for e in verdict.exceptions] == np.flatnonzero(scores.mismatch[: verdict.num_accepted]).tolist()
    assert verdict.tiers.count("exception") == len(verdict.exceptions) <= rule.purse.max_exceptions
    for exception in verdict.exceptions:
        assert exception.draft_id == scores.draft_ids[exception.index]
        assert exception.target_id == scores.next_ids[exception.index]
        assert exception.regret == scores.regret[exception.index]
    spent = ledger.charge(verdict.exceptions).regret_spent
    assert ledger.regret_spent <= spent <= max(rule.purse.budget, ledger.regret_spent)


@given(blocks(), rules(), ledgers, st.sampled_from(["budget", "max_exceptions", "gate"]))
def test_a_zero_anywhere_is_strict_ties_included(scores: ScoreTable, rule: AsdRule, ledger: Ledger, zero: str) -> None:
    tightened = replace(rule, gate=0.0) if zero == "gate" else replace(rule, purse=replace(rule.purse, **{zero: 0}))
    verdict = tightened.judge(scores, ledger)
    assert tightened.is_lossless
    assert verdict == StrictRule().judge(scores, ledger)


@given(blocks(), rules(), ledgers)
def test_it_never_accepts_less_than_strict(scores: ScoreTable, rule: AsdRule, ledger: Ledger) -> None:
    assert rule.judge(scores, ledger).num_accepted >= StrictRule().judge(scores, ledger).num_accepted


@given(blocks(), rules(), ledgers, st.floats(1.0, 4.0), st.integers(0, 3))
def test_monotone_in_budget_gate_and_number_on_one_block(
    scores: ScoreTable, rule: AsdRule, ledger: Ledger, factor: float, more: int
) -> None:
    num_accepted = rule.judge(scores, ledger).num_accepted
    wider = (
        replace(rule, gate=rule.gate * factor),
        replace(rule, purse=replace(rule.purse, budget=rule.purse.budget * factor)),
        replace(rule, purse=replace(rule.purse, max_exceptions=rule.purse.max_exceptions + more)),
    )
    assert all(one.judge(scores, ledger).num_accepted >= num_accepted for one in wider)


@given(blocks(), rules(), ledgers, st.sampled_from([-8.0, 0.0, 4.0]))
def test_a_constant_added_to_a_row_changes_nothing(
    scores: ScoreTable, rule: AsdRule, ledger: Ledger, shift: float
) -> None:
    step = np.float32(0.25)  # quarters: the shifted logits are exact
    rounded = replace(
        scores,
        **{
            name: np.round(getattr(scores, name) / step) * step
            for name in ("next_logits", "draft_logits", "top_logits")
        },
    )
    moved = replace(
        rounded,
        **{name: getattr(rounded, name) + np.float32(shift) for name in ("next_logits", "draft_logits", "top_logits")},
    )
    assert rule.judge(moved, ledger) == rule.judge(rounded, ledger)


@given(st.lists(blocks(), max_size=12), rules())
def test_a_request_never_spends_more_than_its_budget(rounds: list[ScoreTable], rule: AsdRule) -> None:
    ledger, regrets = Ledger(), []
    for scores in rounds:
        verdict = rule.judge(scores, ledger)
        assert rule.judge(scores, ledger) == verdict
        after = ledger.charge(verdict.exceptions)
        assert after.regret_spent >= ledger.regret_spent
        regrets += [exception.regret for exception in verdict.exceptions]
        ledger = after
    assert ledger.regret_spent <= rule.purse.budget
    assert ledger.regret_spent == (list(accumulate(regrets)) or [0.0])[-1]  # one running sum, to the last bit
    assert ledger.num_exceptions == len(regrets)


def block(*gaps: float) -> ScoreTable:
    """Every drafted token is a mismatch with that regret."""
    rows = np.array([[0.0, -gap] for gap in (*gaps, 0.0)], dtype=np.float32)
    return table([1] * len(gaps), rows)


@pytest.mark.parametrize(
    ("q", "q_cap", "gate", "regret", "accepted"),
    [
        ("remaining", 16, 0.25, 1.0, 1),  # 1.0 / 4
        ("remaining", 16, 0.25, 1.125, 0),
        ("remaining", 2, 0.25, 0.5, 1),
        ("remaining", 2, 0.25, 0.625, 0),
        ("normalised", 16, 0.25, 0.25, 1),
        ("normalised", 16, 0.25, 0.375, 0),
    ],
)
def test_q_scales_the_gate_of_the_first_of_four(q: str, q_cap: int, gate: float, regret: float, accepted: int) -> None:
    rule = AsdRule(Purse(8.0, 1), gate=gate, q=q, q_cap=q_cap)
    assert rule.judge(block(regret, 9.0, 9.0, 9.0), Ledger()).num_accepted == accepted


def test_a_stop_is_an_exception_only_where_that_is_relaxed() -> None:
    scores = block(0.125)
    held = AsdRule(Purse(8.0, 2), gate=1.0, q="remaining", q_cap=16, held_ids=frozenset({1}))
    assert held.judge(scores, Ledger()).num_accepted == 0
    assert replace(held, held_ids=frozenset()).judge(scores, Ledger()).num_accepted == 1


def test_a_round_may_have_as_many_exceptions_as_the_last_one() -> None:
    rule = AsdRule(Purse(8.0, 1), gate=1.0, q="remaining", q_cap=16)
    ledger = Ledger(0.5, 7)
    assert rule.judge(block(0.125, 0.125), ledger).num_accepted == 1
