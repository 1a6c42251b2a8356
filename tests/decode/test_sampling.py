"""Sampling, penalties and log probabilities through the whole loop on a real (tiny) model.

Whatever drafts, and however many tokens at once: what is emitted is what plain decoding emits.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from serving.decode.grouping import Grouping
from serving.decode.guard import FixedDrafts
from serving.decode.limits import SchedulerLimits
from serving.decode.offline import Completion, complete
from serving.decode.scheduler import Scheduler
from serving.drafters.model import ModelDrafter
from serving.drafters.ready import PlainDrafter
from serving.drafters.suffix import SuffixDrafter
from serving.memory.suffix import SuffixCache
from serving.models.hf_decoder import HFDecoder
from serving.models.kv_store import KVStore
from serving.models.native import load_native
from serving.models.native_decoder import NativeDecoder
from serving.models.packed_lm import HeadOptions, PackedLM
from serving.protocols import Drafter
from serving.requests import Chunk, GenerationRequest, Limits, Sampling
from serving.types import TokenLogprob, as_ids
from serving.verifiers.full import FullVerifier
from tests.decode.scripted import oracle
from tests.models.tiny import VOCAB, tiny_model

STOP = 2
PROMPT = as_ids([5, 9, 30, 5, 9, 30, 5, 9])


def make_lm(seed: int = 0, *, num_rows: int = 8) -> PackedLM:
    network, kernels = tiny_model("llama", seed=seed, initializer_range=0.15), load_native()
    decoder = HFDecoder(network) if kernels is None else NativeDecoder(network, kernels, max_length=160)
    store = KVStore(decoder.shapes, num_rows, 160, torch.float32)
    return PackedLM(decoder, store, head=HeadOptions(vocab_size=VOCAB), prefill_chunk=64)


def drafters() -> dict[str, Drafter]:
    return {
        "suffix": SuffixDrafter(SuffixCache()),
        "same model": ModelDrafter(make_lm(), max_length=160),
        "other model": ModelDrafter(make_lm(seed=3), max_length=160),
        "wrong": oracle(lambda ids: 3 + len(ids) % 100),
    }


def make_scheduler_of(drafter: Drafter, *, batch: int = 1) -> Scheduler:
    return Scheduler(
        verifier=FullVerifier(make_lm()),
        drafter=drafter,
        decode=lambda ids: "".join(chr(256 + token) for token in ids),
        limits=SchedulerLimits(batch, 128, 64, 8),
        grouping=Grouping(shares_cores=True),
        policy=FixedDrafts(8),
    )


def run(drafter: Drafter, requests: Sequence[GenerationRequest], *, batch: int = 1) -> list[Completion]:
    scheduler = make_scheduler_of(drafter, batch=batch)
    done = {completion.request_id: completion for completion in complete(scheduler, requests)}
    return [done[request.request_id] for request in requests]


def request(name: str, sampling: Sampling, *, max_draft: int = 8, **options: int) -> GenerationRequest:
    limits = Limits(24, frozenset({STOP}), min_tokens=sampling.min_tokens)
    return GenerationRequest(name, PROMPT, limits, sampling, max_draft=max_draft, **options)


SAMPLINGS = {
    "greedy": Sampling(),
    "T=1": Sampling(1.0, seed=11),
    "T=0.7 top-p": Sampling(0.7, seed=12, top_p=0.9),
    "top-k min-p": Sampling(1.2, seed=13, top_k=20, min_p=0.05),
    "penalties": Sampling(frequency_penalty=2.0, presence_penalty=2.0),
    "rewards": Sampling(frequency_penalty=-2.0, presence_penalty=-2.0),
    "sampled penalties": Sampling(0.8, seed=14, frequency_penalty=0.7, presence_penalty=-0.3),
    "bias": Sampling(0.9, seed=15, logit_bias=((7, 3.0), (STOP, 2.0), (9, -100.0))),
    "min tokens": Sampling(1.0, seed=16, logit_bias=((STOP, 8.0),), min_tokens=9, held_ids=(STOP,)),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_case_17_any_drafter_and_draft_length_gives_what_plain_decoding_gives(sampling: Sampling) -> None:
    plain = run(PlainDrafter(), [request("plain", sampling)])[0]
    for name, drafter in drafters().items():
        for max_draft in (1, 3, 8):
            found = run(drafter, [request(f"{name}-{max_draft}", sampling, max_draft=max_draft)])[0]
            assert found.output_ids == plain.output_ids, (name, max_draft)
            assert found.finish_reason == plain.finish_reason


def test_penalties_follow_their_definition() -> None:
    """Plain decoding by hand: logits of a fresh pass, OpenAI's formula, argmax."""
    sampling = Sampling(frequency_penalty=0.9, presence_penalty=0.4, logit_bias=((7, 1.5),))
    found = run(SuffixDrafter(SuffixCache()), [request("a", sampling)])[0].output_ids
    model, ids = make_lm(), PROMPT.tolist()
    for token in found:
        logits = model.all_logits(as_ids(ids))[-1].clone()
        output = ids[len(PROMPT) :]
        for seen in set(output):
            logits[seen] -= 0.9 * output.count(seen) + 0.4
        logits[7] += 1.5
        assert token == int(logits.argmax())
        ids.append(token)


def test_case_16_a_seeded_request_is_the_same_in_any_company() -> None:
    seeded = request("seeded", Sampling(1.0, seed=5))
    company = [request(f"c{i}", Sampling(1.0 if i % 2 else 0.0, seed=100 + i)) for i in range(6)]
    alone = run(PlainDrafter(), [seeded])[0].output_ids
    for drafter in drafters().values():
        for batch in (2, 7):
            assert run(drafter, [*company[:3], seeded, *company[3:]], batch=batch)[3].output_ids == alone


def test_case_16_other_seeds_give_other_texts() -> None:
    found = run(PlainDrafter(), [request(str(seed), Sampling(1.0, seed=seed)) for seed in range(20)], batch=8)
    assert len({tuple(completion.output_ids) for completion in found}) > 15


def test_min_tokens_hold_the_stop_back_and_no_longer() -> None:
    sampling = SAMPLINGS["min tokens"]
    found = run(SuffixDrafter(SuffixCache()), [request("a", sampling)])[0]
    assert found.output_ids.index(STOP) >= sampling.min_tokens
    free = run(PlainDrafter(), [request("a", replace(sampling, min_tokens=0, held_ids=()))])[0]
    assert free.output_ids.index(STOP) < sampling.min_tokens


def logprobs_of(drafter: Drafter, asked: GenerationRequest) -> list[TokenLogprob]:
    found: list[TokenLogprob] = []

    def on_chunk(chunk: Chunk) -> None:
        assert chunk.logprobs is not None
        assert [entry.token_id for entry in chunk.logprobs] == list(chunk.ids)
        found.extend(chunk.logprobs)

    list(complete(make_scheduler_of(drafter), [asked], on_chunk=on_chunk))
    return found


@pytest.mark.parametrize("sampling", [SAMPLINGS[name] for name in ("greedy", "T=1", "sampled penalties")], ids=str)
def test_case_19_log_probabilities_are_those_of_a_fresh_pass(sampling: Sampling) -> None:
    for drafter in (PlainDrafter(), *drafters().values()):
        found = logprobs_of(drafter, request("a", sampling, num_logprobs=5))
        ids = np.concatenate([PROMPT, as_ids([entry.token_id for entry in found])])
        expected = make_lm().all_logits(ids).log_softmax(dim=-1)[len(PROMPT) - 1 : -1]
        for entry, row in zip(found, expected, strict=True):
            assert math.isclose(entry.logprob, float(row[entry.token_id]), abs_tol=1e-4)
            assert [token for token, _ in entry.top] == row.topk(5).indices.tolist()
            assert np.allclose([value for _, value in entry.top], row.topk(5).values, atol=1e-4)


def test_case_03_text_ids_logprobs_and_usage_end_at_the_same_token() -> None:
    whole = run(PlainDrafter(), [request("a", Sampling())])[0]
    stop = whole.text[9:11]  # one letter a token
    limits = Limits(24, frozenset({STOP}), (stop,))
    for drafter in drafters().values():
        asked = replace(request("a", Sampling(), num_logprobs=2), limits=limits)
        chunks: list[Chunk] = []
        done = next(iter(complete(make_scheduler_of(drafter), [asked], on_chunk=chunks.append)))
        assert done.text == whole.text[: whole.text.index(stop)]
        assert done.output_ids == whole.output_ids[: whole.text.index(stop) + 2]
        assert sum(len(chunk.logprobs or ()) for chunk in chunks) == len(done.output_ids) == done.receipt.emitted
