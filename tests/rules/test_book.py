"""What a profile promises of its rule and what the rule that judges says of itself are one thing."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config_rules import AsdCsdRule, AsdRule, CsdRule, RuleConfig, StrictRule
from serving.memory.correction import PairCounts
from serving.requests import Sampling
from serving.rules.book import RuleBook
from serving.types import Ledger, ScoreTable
from tests.decode.scripted import request
from tests.rules.blocks import VOCAB, blocks

ALL_SEEN = PairCounts.of({(draft, target): 9 for draft in range(VOCAB) for target in range(VOCAB)})

purses = st.sampled_from([(0.0, 0), (0.0, 2), (8.0, 1), (1e6, 64)])
gates = st.sampled_from([0.0, 0.25, 1e3])
counts = st.sampled_from([-1.0, 6.0, math.inf])
ratios = st.sampled_from([0.0, 0.01, 1.0, 1.5])


@st.composite
def configs(draw: st.DrawFn) -> RuleConfig:
    budget, max_exceptions = draw(purses)
    asd = {"budget": budget, "max_exceptions": max_exceptions, "gate": draw(gates)}
    csd = {"count_above": draw(counts), "min_ratio": draw(ratios)}
    combined = [AsdCsdRule(**asd, **csd, combine=combine) for combine in ("and", "or")]
    return draw(st.sampled_from([StrictRule(), AsdRule(**asd), CsdRule(**csd), *combined]))


@given(configs(), blocks())
def test_a_config_is_lossless_iff_its_rule_is_and_then_nothing_but_the_targets_own_is_emitted(
    config: RuleConfig, scores: ScoreTable
) -> None:
    terms = RuleBook(config, frozen=ALL_SEEN).open(request("a"))
    assert config.is_lossless == terms.rule.is_lossless == terms.receipt.lossless
    if config.is_lossless:
        assert terms.rule.judge(scores, Ledger()).exceptions == ()


@pytest.mark.parametrize("sampling", [Sampling(logit_bias=((7, 1.0),)), Sampling(frequency_penalty=0.5)], ids=str)
def test_a_receipt_says_whose_distribution_its_regret_is_of(sampling: Sampling) -> None:
    adjusted = replace(request("a"), sampling=sampling)
    said = "measured on the target's distribution as the request adjusts it"
    for config in (AsdRule(), CsdRule(), AsdCsdRule()):
        assert said in RuleBook(config).open(adjusted).receipt.reason
        assert said not in RuleBook(config).open(request("a")).receipt.reason
    assert said not in RuleBook(AsdRule(budget=0.0)).open(adjusted).receipt.reason
