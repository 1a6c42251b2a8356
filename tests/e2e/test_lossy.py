"""Lossy rules on the embedded model: strict at their limits, and receipts that a fresh forward confirms."""

from collections.abc import Callable

import pytest

from serving.build import Built
from serving.config import ModelDrafter, SuffixDrafter
from serving.config_rules import AsdCsdRule, AsdRule, CsdRule, RuleConfig
from serving.decode.offline import Completion, complete
from serving.models.embedded import EMBEDDED_MODEL
from serving.models.loading import LoadOptions, load_packed_lm
from serving.models.packed_lm import PackedLM
from serving.models.tokenizer import ChatTokenizer
from serving.requests import GenerationRequest
from serving.types import as_ids
from tuning.scoring import discrepancies, score_output

pytestmark = pytest.mark.slow

Make = Callable[..., Built]
INFINITE = float("inf")


def run(built: Built, requests: list[GenerationRequest]) -> dict[str, Completion]:
    return {done.request_id: done for done in complete(built.scheduler, requests)}


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    "rule",
    [
        AsdRule(budget=0.0),
        AsdRule(budget=0.0, max_exceptions=0),
        AsdRule(gate=0.0),
        CsdRule(count_above=INFINITE),
        CsdRule(count_above=-1.0, min_ratio=1.01),
        AsdCsdRule(budget=0.0, combine="or", count_above=-1.0),
    ],
    ids=["B=0", "M=0", "g=0", "lambda=inf", "tau>1", "B=0, or"],
)
def test_ids_are_strict_where_nothing_may_be_accepted(
    make: Make, requests: list[GenerationRequest], expected: dict[str, list[int]], rule: RuleConfig, batch: int
) -> None:
    done = run(make(ModelDrafter(max_draft=4), batch=batch, rule=rule), requests)
    assert {name: one.output_ids for name, one in done.items()} == expected
    assert all(one.receipt.lossless and not one.exceptions for one in done.values())


@pytest.fixture(scope="module")
def fresh_target(tokenizer: ChatTokenizer) -> PackedLM:
    options = LoadOptions(
        role="target", dtype="float32", num_rows=1, max_length=512, prefill_chunk=512, vocab_size=tokenizer.vocab_size
    )
    return load_packed_lm(EMBEDDED_MODEL, options)


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        (ModelDrafter(max_draft=4), AsdRule()),
        (ModelDrafter(max_draft=4), CsdRule(count_above=0.0)),
        (ModelDrafter(max_draft=6), AsdCsdRule(combine="or", gate=1.0, count_above=-1.0)),
        (SuffixDrafter(max_draft=8), AsdRule(gate=1.0, budget=16.0)),
    ],
    ids=["asd", "csd", "asd-csd", "asd, suffix"],
)
def test_each_token_is_the_target_s_or_a_recorded_exception_with_its_regret(
    make: Make, requests: list[GenerationRequest], fresh_target: PackedLM, drafter: object, rule: RuleConfig
) -> None:
    done = run(make(drafter, rule=rule), requests)
    assert sum(len(one.exceptions) for one in done.values()) > 0
    for request in requests:
        one = done[request.request_id]
        scored = score_output(fresh_target, request.prompt_ids, as_ids(one.output_ids))
        assert discrepancies(scored.table, one.exceptions) == []
        assert one.receipt.regret_spent == sum(exception.regret for exception in one.exceptions)
        assert one.receipt.budget is None or one.receipt.regret_spent <= one.receipt.budget
        if one.exceptions:  # the check can fail
            assert len(discrepancies(scored.table, one.exceptions[1:])) == 1
            wrong = [*one.output_ids[:-1], (one.output_ids[-1] + 1) % 1000]
            assert discrepancies(score_output(fresh_target, request.prompt_ids, as_ids(wrong)).table, one.exceptions)
