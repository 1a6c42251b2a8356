"""What a receipt says of three tiers: after a failover, under a bounded rule, and of tokens that were written again."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from serving.config_rules import AsdRule
from serving.decode.offline import complete
from serving.models.hf_decoder import HFDecoder
from serving.protocols import ScoreRequest
from serving.requests import Chunk, GenerationRequest
from serving.rules.via import ViaGates
from serving.types import ScoreTable, as_ids
from tests.models.test_packed_lm import make_lm
from tests.models.tiny import tiny_model
from tests.verifiers.test_via import ALL, DEEP, KEPT, LAX, Bench, asked

pytestmark = pytest.mark.usefixtures("one_thread")

REWRITES = ViaGates(theta_accept=1.5, theta_escalate=1.0, min_confidence=0.0)


def chunks_of(bench: Bench, request: GenerationRequest) -> list[Chunk]:
    chunks: list[Chunk] = []
    list(complete(bench.scheduler, [request], on_chunk=chunks.append))
    return chunks


def test_the_time_of_a_full_pass_is_its_own() -> None:
    """Neither rounds without one count, nor what the slim verifier takes."""
    bench, nap_s = Bench(LAX), 0.004
    score = bench.slim.score

    def slow(requests: Sequence[ScoreRequest]) -> list[ScoreTable | None]:
        time.sleep(nap_s)
        return score(requests)

    bench.slim.score = slow  # type: ignore[method-assign]
    bench.run(asked())
    stats = bench.scheduler.stats
    assert stats.forwards == len(bench.full.requests) < stats.rounds
    assert 0.0 < stats.forward_s <= stats.verify_s - nap_s * len(bench.slim.requests)


def test_without_a_slim_verifier_every_round_is_a_full_pass() -> None:
    bench = Bench(None)
    bench.run(asked())
    stats = bench.scheduler.stats
    assert stats.forwards == stats.rounds
    assert 0.0 < stats.forward_s <= stats.verify_s


def lost_unseen() -> GenerationRequest:
    """A request whose replica died when no full pass had seen its last tokens."""
    request = asked()
    chunks = chunks_of(Bench(LAX), request)
    place = next(i for i, one in enumerate(chunks) if one.receipt.slim is not None and one.receipt.slim.unseen > 3)
    told = [token for chunk in chunks[: place + 1] for token in chunk.ids]
    return replace(request, request_id="a~1", resume_ids=as_ids(told), receipt=chunks[place].receipt)


def test_tokens_that_no_full_pass_had_seen_are_audited_by_the_replica_that_takes_over() -> None:
    request = lost_unseen()
    last = chunks_of(Bench(LAX), request)[-1].receipt.slim
    assert last is not None
    assert last.audited + last.unseen == last.accepted + last.regenerated
    whole = np.concatenate([request.prompt_ids, request.resume_ids])
    target = make_lm(HFDecoder(tiny_model("llama", num_hidden_layers=DEEP)))
    logits = target.all_logits(whole[:-1])[len(request.prompt_ids) - 1 :]
    regret = (logits.max(dim=-1).values - logits[range(len(request.resume_ids)), request.resume_ids]).numpy()
    (first, *_) = chunks_of(Bench(LAX), request)
    assert first.receipt.slim is not None
    assert first.receipt.slim.audit_regret == pytest.approx(float(regret.sum()), abs=1e-2)


def test_a_replica_that_takes_over_owns_up_to_slim_tokens_before_its_first_round() -> None:
    bench, chunks = Bench(LAX), []
    bench.scheduler.submit(lost_unseen(), chunks.append)
    bench.scheduler._admit()
    bench.scheduler.cancel("a~1")
    (chunk,) = chunks
    assert (chunk.receipt.lossless, chunk.receipt.budget) == (False, None)
    assert "audit_regret" in chunk.receipt.reason


def test_nothing_bounds_an_answer_with_a_slim_token_under_the_strict_rule() -> None:
    chunks = chunks_of(Bench(LAX), asked())
    for chunk in chunks:
        slim = chunk.receipt.slim
        has_slim = slim is not None and slim.accepted + slim.regenerated > 0
        assert (chunk.receipt.budget, chunk.receipt.regret_left) == ((None, None) if has_slim else (0.0, 0.0))
    assert has_slim


def test_the_reason_names_the_budget_of_what_the_target_decided_and_that_the_rest_is_unbounded() -> None:
    bench = Bench(replace(LAX, theta_accept=0.2, theta_escalate=0.2), rule=AsdRule(budget=30.0, gate=20.0))
    receipt = chunks_of(bench, asked(max_tokens=100))[-1].receipt
    assert receipt.budget is None
    assert receipt.reason.count("nothing bounds them") == 1
    assert receipt.reason.count("at most 30 nats") == 1


def test_a_token_that_is_written_again_as_it_was_drafted_is_not_replaced() -> None:
    """Tier A is off, so tier B writes every token, most of them the drafted ones."""
    bench = Bench(REWRITES, kept=ALL)
    chunks: list[Chunk] = []
    verify, drafts = bench.scheduler._verifier.verify, []

    def noted(proposals):
        drafts.append(proposals[0].draft.ids)
        return verify(proposals)

    bench.scheduler._verifier.verify = noted  # type: ignore[method-assign]
    list(complete(bench.scheduler, [asked()], on_chunk=chunks.append))
    receipt = chunks[-1].receipt
    assert receipt.slim is not None
    assert receipt.slim.regenerated > 3
    pairs = [(chunk.ids, draft) for chunk, draft in zip(chunks, drafts, strict=True)]
    changed = sum(
        any(token != drafted for token, drafted in zip(ids, draft.tolist(), strict=False)) for ids, draft in pairs
    )
    assert receipt.replaced == changed > 0


def test_no_cache_holds_more_than_all_but_the_last_committed_token() -> None:
    for gates, kept in ((LAX, KEPT), (replace(LAX, has_bonus=True), KEPT), (REWRITES, ALL)):
        bench = Bench(gates, kept=kept)
        bench.scheduler.submit(asked(), lambda _: None)
        num_slim = 0
        while bench.scheduler.has_work:
            bench.scheduler.step()
            for run in bench.scheduler._running.values():
                num_slim += run.session.receipt.slim is not None
                for watched in (bench.full, bench.slim):
                    row = watched.model.store.row("a")
                    assert row.shared_prefix(run.session.tokens) <= len(run.session) - 1
        assert num_slim > 0


def test_the_histogram_has_only_blocks_that_the_target_judged_alone_as_calibration_saw_them() -> None:
    """What a slim verifier escalates is what it found hard: it would look like drift."""
    alone = Bench(replace(LAX, max_unverified=0))
    strict = Bench(None)
    for bench in (alone, strict):
        bench.run(asked(max_tokens=100))
    assert alone.scheduler.stats.first_mismatches == strict.scheduler.stats.first_mismatches
    assert sum(strict.scheduler.stats.first_mismatches) > 0
    never = Bench(replace(LAX, theta_accept=0.99, theta_escalate=0.99, max_unverified=4096))
    never.run(asked(max_tokens=100))
    stats = never.scheduler.stats
    assert stats.target_passes > 0
    assert stats.replaced > 0
    assert sum(stats.first_mismatches) == 0
