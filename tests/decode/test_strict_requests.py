"""Requests that can make no exception, by their profile or their own wish: each is strict and says so."""

from dataclasses import replace

import pytest

from serving.config_rules import AsdCsdRule, AsdRule, CsdRule, RuleConfig
from serving.decode.limits import SchedulerLimits
from serving.errors import RequestError
from serving.requests import Chunk, Sampling, Tightening
from tests.decode.scripted import arithmetic, request
from tests.decode.test_lossy import RULES, run


@pytest.mark.parametrize(
    ("rule", "tightening"),
    [
        (AsdRule(budget=0.0), Tightening()),
        (AsdRule(budget=0.0, max_exceptions=0), Tightening()),
        (AsdRule(gate=0.0), Tightening()),
        (AsdRule(gate=1.0), Tightening(budget=0.0)),
        (AsdRule(gate=1.0), Tightening(max_exceptions=0)),
        (AsdRule(gate=1.0), Tightening(gate=0.0)),
        (AsdRule(gate=1.0), Tightening(is_strict=True)),
        (CsdRule(count_above=float("inf")), Tightening()),
        (CsdRule(min_ratio=1.5), Tightening()),
        (CsdRule(), Tightening(is_strict=True)),
        (AsdCsdRule(combine="or"), Tightening(budget=0.0)),
        (AsdCsdRule(count_above=float("inf")), Tightening()),
    ],
)
def test_the_limits_of_each_rule_are_strict_and_say_so(rule: RuleConfig, tightening: Tightening) -> None:
    check_is_strict(run(rule, tightening=tightening))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_a_request_without_drafts_is_strict_and_says_so(rule: RuleConfig) -> None:
    check_is_strict(run(rule, max_draft=0))


def check_is_strict(chunks: list[Chunk]) -> None:
    ids: list[int] = []
    for chunk in chunks:
        ids.extend(chunk.ids)
    assert ids == [arithmetic([5, 9, *ids[:place]]) for place in range(20)]
    receipt = chunks[-1].receipt
    assert (receipt.lossless, receipt.num_exceptions, receipt.regret_spent) == (True, 0, 0.0)
    assert (receipt.budget, receipt.regret_left, receipt.exhausted_at) == (0.0, 0.0, None)
    assert "every token is the target's own" in receipt.reason


def test_a_request_that_samples_is_refused_at_admission_under_a_lossy_rule() -> None:
    limits = SchedulerLimits(1, 64, 4, 4, rule=AsdRule())
    sampled = replace(request("a"), sampling=Sampling(0.7))
    with pytest.raises(RequestError, match="temperature: is 0"):
        limits.check(sampled)
    limits.check(replace(sampled, tightening=Tightening(is_strict=True)))
    limits.check(replace(sampled, tightening=Tightening(budget=0.0)))
    without_drafts = replace(sampled, max_draft=0)
    for one in (limits, replace(limits, greedy_only="verifier 'via'")):
        one.check(without_drafts)
    with pytest.raises(RequestError, match="may only lower"):
        limits.check(replace(without_drafts, tightening=Tightening(budget=99.0)))
