"""Receipts of answers in which a slim verifier decided tokens, held against a fresh pass of the target."""

from dataclasses import replace

import numpy as np
import pytest

from serving.models.hf_decoder import HFDecoder
from serving.requests import SlimReceipt
from serving.types import as_ids
from tests.models.test_packed_lm import make_lm
from tests.models.tiny import tiny_model
from tests.rules.blocks import table
from tests.verifiers.test_via import DEEP, LAX, Bench, asked
from tuning.scoring import discrepancies, false_slim, score_output

ROWS = np.array([[1.0, 0.5, 0.0]] * 5, dtype=np.float32)
SCORES = table([1, 0, 2, 1], ROWS)  # regrets 0.5, 0, 1, 0.5
TIERS = ("slim", "accepted", "regenerated", "slim")
HONEST = SlimReceipt(accepted=2, regenerated=1, passes=2, audited=2, audit_regret=1.5, unseen=1)


def test_what_a_slim_verifier_decided_need_not_be_the_targets_own() -> None:
    assert discrepancies(SCORES, [], TIERS) == []
    assert discrepancies(SCORES, [], ("accepted", *TIERS[1:])) == ["token 0: not the target's, and no exception"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"accepted": 1}, "slim.accepted is 1, its tiers make 2"),
        ({"regenerated": 0}, "slim.regenerated is 0, its tiers make 1"),
        ({"unseen": 0}, "slim.audited and slim.unseen make 2, of 3 that the slim verifier decided"),
        ({"audit_regret": 1.6}, "slim.audit_regret is 1.60000, found 1.50000"),
        ({"audit_regret": float("nan")}, "slim.audit_regret is nan, found 1.50000"),
    ],
)
def test_a_slim_receipt_that_is_not_what_tiers_and_target_say_is_found(wrong: dict[str, float], said: str) -> None:
    assert false_slim(SCORES, HONEST, TIERS) == false_slim(SCORES, None, ("accepted",) * 4) == []
    (problem,) = false_slim(SCORES, replace(HONEST, **wrong), TIERS)  # type: ignore[arg-type]
    assert said in problem


def test_a_receipt_without_a_slim_part_cannot_have_its_tokens() -> None:
    assert "slim.accepted is 0, its tiers make 2" in false_slim(SCORES, None, TIERS)[0]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("has_bonus", [False, True])
def test_the_receipts_of_three_tiers_are_confirmed(has_bonus: bool) -> None:
    request = asked(max_tokens=60, wants_tiers=True)
    (done,) = Bench(replace(LAX, has_bonus=has_bonus)).run(request)
    target = make_lm(HFDecoder(tiny_model("llama", num_hidden_layers=DEEP)))
    scored = score_output(target, request.prompt_ids, as_ids(done.output_ids)).table
    assert scored.mismatch.any()
    assert done.receipt.slim is not None
    assert done.receipt.slim.audited > 0
    assert discrepancies(scored, done.exceptions, done.tiers) == false_slim(scored, done.receipt.slim, done.tiers) == []
