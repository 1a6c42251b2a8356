"""CSD and its composition with ASD on random blocks, against loops; and what ties the methods together."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.memory.correction import EMPTY_COUNTS, PairCounts, RequestMemory
from serving.rules.asd import AsdRule
from serving.rules.asd_csd import AsdCsdRule
from serving.rules.budget import Purse
from serving.rules.csd import CsdRule
from serving.rules.prefix import accept_prefix
from serving.rules.strict import StrictRule
from serving.types import Ledger, ScoreTable
from tests.rules.blocks import VOCAB, blocks, some, table
from tests.rules.test_asd import q_of
from tests.rules.test_asd import rules as asd_rules

pairs = st.tuples(st.integers(0, VOCAB - 1), st.integers(0, VOCAB - 1))
counts = st.dictionaries(pairs, st.integers(0, 9), max_size=12)


@st.composite
def rules(draw: st.DrawFn) -> CsdRule:
    memory = RequestMemory(PairCounts.of(draw(counts)))
    return CsdRule(
        memory,
        count_above=some(draw, -1.0, 0.0, 3.0, 6.0, math.inf),
        min_ratio=some(draw, 0.0, 0.01, 0.5, 1.0, 1.5),
        held_ids=draw(st.sampled_from([frozenset(), frozenset({4})])),
    )


def is_rescued(rule: CsdRule, scores: ScoreTable, index: int) -> bool:
    draft, target, regret = int(scores.draft_ids[index]), int(scores.next_ids[index]), float(scores.regret[index])
    return (
        math.isfinite(regret)
        and rule.memory.count(draft, target) > rule.count_above
        and regret <= (-math.log(rule.min_ratio) if rule.min_ratio > 0 else math.inf)
        and not {draft, target} & rule.held_ids
    )


@given(blocks(impossible=True), rules())
def test_vectorised_equals_the_loop(scores: ScoreTable, rule: CsdRule) -> None:
    accepted = 0
    while accepted < len(scores.draft_ids) and (
        scores.draft_ids[accepted] == scores.next_ids[accepted] or is_rescued(rule, scores, accepted)
    ):
        accepted += 1
    verdict = rule.judge(scores, Ledger())
    assert verdict.num_accepted == accepted
    for exception in verdict.exceptions:
        assert exception.count == rule.memory.count(exception.draft_id, exception.target_id) > rule.count_above


@given(blocks(), rules(), st.sampled_from([{"count_above": math.inf}, {"min_ratio": 1.5}]))
def test_an_infinite_count_or_a_ratio_above_one_is_strict(
    scores: ScoreTable, rule: CsdRule, limit: dict[str, float]
) -> None:
    tightened = replace(rule, **limit)
    assert tightened.is_lossless
    verdict, strict = tightened.judge(scores, Ledger()), StrictRule().judge(scores, Ledger())
    assert (verdict.num_accepted, verdict.next_id, verdict.exceptions) == (strict.num_accepted, strict.next_id, ())


@given(blocks(), rules(), st.sampled_from([0.0, 6.0]))
def test_an_empty_memory_is_strict_unless_counts_below_zero_will_do(
    scores: ScoreTable, rule: CsdRule, count_above: float
) -> None:
    empty = replace(rule, memory=RequestMemory(EMPTY_COUNTS), count_above=count_above)
    assert empty.judge(scores, Ledger()).exceptions == ()


@given(blocks(impossible=True), rules())
def test_a_zero_ratio_is_memory_only_and_a_negative_count_gate_only(scores: ScoreTable, rule: CsdRule) -> None:
    for exception in replace(rule, min_ratio=0.0).judge(scores, Ledger()).exceptions:
        assert math.isfinite(exception.regret)
    gate_only = replace(rule, count_above=-1.0, memory=RequestMemory(EMPTY_COUNTS), held_ids=frozenset())
    limit = -math.log(rule.min_ratio) if rule.min_ratio > 0 else math.inf
    keep = ~scores.mismatch | (np.isfinite(scores.regret) & (scores.regret <= limit))
    assert gate_only.judge(scores, Ledger()).num_accepted == accept_prefix(scores, keep).num_accepted


@given(blocks(), rules())
def test_no_pair_nominates_itself_within_a_block(scores: ScoreTable, rule: CsdRule) -> None:
    verdict = rule.judge(scores, Ledger())
    assert rule.judge(scores, Ledger()) == verdict
    for seen in verdict.seen:
        assert seen.count == rule.memory.count(seen.draft_id, seen.target_id)
    before = [rule.memory.count(seen.draft_id, seen.target_id) for seen in verdict.seen]
    rule.learn(verdict)
    after = [rule.memory.count(seen.draft_id, seen.target_id) for seen in verdict.seen]
    assert all(new > old for old, new in zip(before, after, strict=True))


@given(blocks(), rules(), asd_rules(), st.sampled_from(["and", "or"]), st.sampled_from([0.0, 0.4, 2.0]))
def test_composition_equals_the_loop_and_always_pays(
    scores: ScoreTable, csd: CsdRule, asd: AsdRule, combine: str, spent: float
) -> None:
    run, number, size = spent, 0, len(scores.draft_ids)
    accepted = 0
    for accepted in range(size + 1):
        if accepted == size or scores.draft_ids[accepted] == scores.next_ids[accepted]:
            continue
        regret = float(scores.regret[accepted])
        passes_gate = (
            asd.gate > 0
            and regret / q_of(asd, accepted, size) <= asd.gate
            and int(scores.draft_ids[accepted]) not in asd.held_ids
        )
        tests = (is_rescued(csd, scores, accepted), passes_gate)
        if not (
            (all(tests) if combine == "and" else any(tests))
            and math.isfinite(regret)
            and number < asd.purse.max_exceptions
            and run < asd.purse.budget
            and run + regret <= asd.purse.budget
        ):
            break
        run, number = run + regret, number + 1
    verdict = AsdCsdRule(asd, csd, combine=combine).judge(scores, Ledger(spent))
    assert verdict.num_accepted == accepted
    assert Ledger(spent).charge(verdict.exceptions) == Ledger(run, number)


@given(blocks(), rules(), asd_rules(), st.sampled_from(["and", "or"]))
def test_no_budget_is_strict_in_either_composition(
    scores: ScoreTable, csd: CsdRule, asd: AsdRule, combine: str
) -> None:
    broke = AsdCsdRule(replace(asd, purse=replace(asd.purse, budget=0.0)), csd, combine=combine)
    assert broke.is_lossless
    assert broke.judge(scores, Ledger()).num_accepted == StrictRule().judge(scores, Ledger()).num_accepted


@given(blocks(impossible=True), st.sampled_from([0.3, 0.5, math.exp(-1.0), math.exp(-0.1), 0.9]))
def test_asd_csd_and_a_gate_on_regret_are_one_rule_at_their_limits(scores: ScoreTable, t: float) -> None:
    """ASD without budget at q = 1, CSD with everything nominated, and VIA's gate: r <= -ln t."""
    asd = AsdRule(Purse(math.inf, 99), gate=-math.log(t), q="remaining", q_cap=1)
    csd = CsdRule(RequestMemory(EMPTY_COUNTS), count_above=-1.0, min_ratio=t)
    gate = accept_prefix(scores, ~scores.mismatch | (scores.regret <= -math.log(t)))
    assert asd.judge(scores, Ledger()) == gate
    assert csd.judge(scores, Ledger()) == gate


@pytest.mark.parametrize(("draft", "target"), [(4, 0), (1, 4)])
def test_a_stop_is_never_rescued_nor_run_over(draft: int, target: int) -> None:
    rows = np.full((2, VOCAB), -9.0, dtype=np.float32)
    rows[0, draft], rows[0, target] = 1.0, 1.125
    memory = RequestMemory(PairCounts.of({(draft, target): 99}))
    rule = CsdRule(memory, count_above=6.0, min_ratio=0.01, held_ids=frozenset({4}))
    scores = table([draft], rows)
    assert rule.judge(scores, Ledger()).num_accepted == 0
    assert replace(rule, held_ids=frozenset()).judge(scores, Ledger()).num_accepted == 1
