"""PackedLM against the stock models: logits of ragged batches, chunks, rollbacks and shared prefixes."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from serving.errors import ModelError
from serving.models.hf_decoder import HFDecoder, check_layers
from serving.models.kv_store import KVStore
from serving.models.native import load_native
from serving.models.native_decoder import NativeDecoder, supports
from serving.models.packed import Segment, pack
from serving.models.packed_lm import HeadOptions, PackedLM
from serving.protocols import ScoreRequest
from serving.requests import Sampling
from serving.types import Ids
from tests.models.tiny import FAMILIES, VOCAB, tiny_model

CAPACITY = 160


def decoders(family: str) -> list[Any]:
    """Every decoder that claims `family`, each with its own copy of the same weights."""
    found: list[Any] = [HFDecoder(copy.deepcopy(tiny_model(family)))]
    kernels = load_native()
    if kernels is not None and supports(tiny_model(family), kernels):
        found.append(NativeDecoder(tiny_model(family), kernels, max_length=CAPACITY))
    return found


def make_store(decoder: Any, *, num_rows: int = 4, feature_layers: tuple[int, ...] = ()) -> KVStore:
    hidden = tiny_model("llama").config.hidden_size
    return KVStore(decoder.shapes, num_rows, CAPACITY, torch.float32, feature_layers=feature_layers, hidden=hidden)


def stock_features(ids: Ids, layers: tuple[int, ...]) -> torch.Tensor:
    """[n, len(layers) * H]: what enters `layers` of the stock llama."""
    with torch.no_grad():
        model, entering = copy.deepcopy(tiny_model("llama")), []
        for place in (*model.model.layers, model.model.norm):
            place.register_forward_pre_hook(lambda _, args: entering.append(args[0][0]))
        model(torch.from_numpy(ids.astype(np.int64))[None])
    return torch.cat([entering[layer] for layer in layers], dim=-1)


def make_lm(decoder: Any, *, num_rows: int = 4, prefill_chunk: int = 256, waits: bool = False) -> PackedLM:
    head = HeadOptions(vocab_size=VOCAB)
    store = make_store(decoder, num_rows=num_rows)
    return PackedLM(decoder, store, head=head, prefill_chunk=prefill_chunk, waits_for_prefixes=waits)


def random_ids(length: int, seed: int) -> Ids:
    return np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)


def stock_logits(network: Any, ids: Ids) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = network(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].float()
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_stock_model_in_ragged_chunks(family: str) -> None:
    texts = [random_ids(length, length) for length in (37, 1, 20)]
    expected = [stock_logits(tiny_model(family), ids) for ids in texts]
    for decoder in decoders(family):
        store = make_store(decoder)
        for index in range(len(texts)):
            store.open(str(index), texts[index][:0])
        found: list[list[torch.Tensor]] = [[] for _ in texts]
        # chunks of different size for each sequence, all in one row
        for chunk in range(4):
            segments = []
            for index, ids in enumerate(texts):
                bounds = np.linspace(0, len(ids), 5).astype(int)
                if bounds[chunk + 1] > bounds[chunk]:
                    segments.append(
                        (
                            index,
                            Segment(store.row(str(index)), ids, int(bounds[chunk]), int(bounds[chunk + 1])),
                        )
                    )
            step = pack([s for _, s in segments], store)
            logits = decoder.logits(decoder.forward(step, store))
            at = 0
            for index, segment in segments:
                found[index].append(logits[at : at + segment.stop - segment.start])
                at += segment.stop - segment.start
        for rows, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.cat(rows), reference, atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2"])
def test_rows_after_a_rollback_equal_a_fresh_forward(family: str) -> None:
    ids, wrong = random_ids(30, 1), random_ids(6, 2)
    reference = stock_logits(tiny_model(family), ids)
    for decoder in decoders(family):
        lm = make_lm(decoder)
        lm.open("a", ids)
        rejected = np.concatenate([ids[:20], wrong])
        lm.score([ScoreRequest("a", rejected, num_rows=7)])
        (table,) = lm.score([ScoreRequest("a", ids, num_rows=9)])
        assert table is not None
        np.testing.assert_allclose(table.next_logits, reference[21:].max(dim=-1).values, atol=1e-3)
        np.testing.assert_array_equal(table.next_ids, reference[21:].argmax(dim=-1))
        lm.store.check_integrity()


def test_prompts_are_fed_in_chunks_and_do_not_hold_up_decoding() -> None:
    for decoder in decoders("llama"):
        lm = make_lm(decoder, prefill_chunk=16)
        long, short = random_ids(100, 3), random_ids(5, 4)
        lm.open("long", long)
        lm.open("short", short)
        passes = 0
        while True:
            tables = lm.score([ScoreRequest("long", long), ScoreRequest("short", short)])
            passes += 1
            assert tables[1] is not None
            if tables[0] is not None:
                break
        assert passes == 6  # five of 16, then what is left counts as a catch-up
        assert tables[0].next_ids[0] == stock_logits(tiny_model("llama"), long)[-1].argmax()


def test_native_rows_are_the_same_bits_in_any_company() -> None:
    kernels = load_native()
    if kernels is None:
        return  # no compiler here: the stock modules run, which promise no such thing
    ids = random_ids(40, 5)
    ends = set()
    for chunk in (1, 4, 8, 40):
        lm = make_lm(NativeDecoder(tiny_model("llama"), kernels, max_length=CAPACITY))
        lm.open("a", ids)
        lm.open("b", ids)
        for stop in range(chunk, len(ids) + 1, chunk):
            neighbours = [ScoreRequest("b", random_ids(stop, stop))] * (stop % 2)
            table = lm.score([ScoreRequest("a", ids[:stop]), *neighbours])[0]
        assert table is not None
        ends.add(float(table.next_logits[0]))
    assert len(ends) == 1


def test_case_11_a_long_block_equals_single_steps() -> None:
    ids = random_ids(60, 6)
    for decoder in decoders("llama"):
        single, block = make_lm(decoder), make_lm(decoder)
        single.open("a", ids)
        block.open("a", ids)
        single.score([ScoreRequest("a", ids[:39])])
        block.score([ScoreRequest("a", ids[:39])])
        steps = [single.score([ScoreRequest("a", ids[:stop])])[0] for stop in range(40, 61)]
        (table,) = block.score([ScoreRequest("a", ids, num_rows=21)])
        assert table is not None
        np.testing.assert_array_equal(table.next_ids, [step.next_ids[0] for step in steps if step is not None])


def test_a_shared_prefix_is_reused_within_its_salt_only() -> None:
    ids = random_ids(64, 7)
    for decoder in decoders("llama"):
        lm = make_lm(decoder)
        assert lm.open("cold", ids, salt="a") == 0
        lm.score([ScoreRequest("cold", ids)])
        assert lm.open("busy", ids, salt="a") == 64  # copied from a row in use
        assert lm.open("other", ids, salt="b") == 0
        lm.close("cold")
        assert lm.open("warm", ids, salt="a") == 64  # the closed row, as it is
        reference = stock_logits(tiny_model("llama"), ids)[-1]
        for session in ("busy", "warm"):
            (table,) = lm.score([ScoreRequest(session, ids)])
            assert table is not None
            assert table.next_ids[0] == reference.argmax()
            assert abs(float(table.next_logits[0]) - float(reference.max())) < 1e-3
        lm.store.check_integrity()


def texts_after(prefix: Ids, count: int, *, own: int = 6) -> list[Ids]:
    return [np.concatenate([prefix, random_ids(own, seed)]) for seed in range(count)]


def passes_of(lm: PackedLM, texts: list[Ids], *, salts: str = "") -> list[int]:
    """In which pass each of `texts` was scored, all asked for together; the tokens are the stock model's."""
    for index, ids in enumerate(texts):
        lm.open(str(index), ids, salt=salts[index : index + 1])
    done: dict[int, int] = {}
    number = 0
    while len(done) < len(texts):
        number += 1
        asked = [index for index in range(len(texts)) if index not in done]
        tables = lm.score([ScoreRequest(str(index), texts[index]) for index in asked])
        for index, table in zip(asked, tables, strict=True):
            if table is not None:
                done[index] = number
                assert table.next_ids[0] == stock_logits(tiny_model("llama"), texts[index])[-1].argmax()
    for index in range(len(texts)):
        lm.close(str(index))
    return [done[index] for index in range(len(texts))]


@pytest.mark.parametrize(("prefill_chunk", "waits"), [(46, False), (46, True), (400, True)])
def test_what_comes_together_reads_a_shared_prefix_once(prefill_chunk: int, waits: bool) -> None:
    for decoder in decoders("llama"):
        lm = make_lm(decoder, prefill_chunk=prefill_chunk, waits=waits)
        # 46 tokens of the first, then 6 of each other one
        assert passes_of(lm, texts_after(random_ids(40, 8), 4)) == [1, 2, 2, 2]


def test_nobody_waits_where_little_would_be_gained() -> None:
    prefix = random_ids(40, 8)
    for decoder in decoders("llama"):
        assert passes_of(make_lm(decoder), texts_after(prefix, 4)) == [1, 1, 1, 1]  # a drafter would miss a round
        waiting = partial(make_lm, decoder, waits=True)
        assert passes_of(waiting(), texts_after(prefix, 4), salts="abca") == [1, 1, 1, 2]
        assert passes_of(waiting(), texts_after(prefix[:15], 4)) == [1, 1, 1, 1]
        assert passes_of(waiting(), texts_after(prefix, 3, own=42)) == [1, 1, 1]
        warm = waiting()
        passes_of(warm, texts_after(prefix, 1))
        assert passes_of(warm, texts_after(prefix, 4)) == [1, 1, 1, 1]  # read before


def test_more_that_is_shared_is_waited_for_behind_a_prefix_that_all_have() -> None:
    known, more = random_ids(30, 8), random_ids(50, 9)
    for decoder in decoders("llama"):
        lm = make_lm(decoder, waits=True)
        passes_of(lm, texts_after(known, 1))
        assert passes_of(lm, texts_after(np.concatenate([known, more]), 4)) == [1, 2, 2, 2]


def test_case_13_layers_that_cannot_be_rolled_back_are_refused_by_name() -> None:
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(ModelError, match="linear_attention"):
        check_layers(config)


def test_a_sampled_token_depends_on_seed_and_position_alone() -> None:
    ids = random_ids(30, 8)
    sampling = Sampling(temperature=0.8, seed=5)
    for decoder in decoders("llama"):
        lm = make_lm(decoder)
        lm.open("a", ids)
        lm.open("greedy", ids)
        (block,) = lm.score([ScoreRequest("a", ids, num_rows=10, sampling=sampling)])
        assert block is not None
        singles = []
        for stop in range(21, 31):
            requests = [ScoreRequest("greedy", ids[:stop]), ScoreRequest("a", ids[:stop], sampling=sampling)]
            table = lm.score(requests)[1]
            assert table is not None
            singles.append(int(table.next_ids[0]))
        assert block.next_ids.tolist() == singles
        assert block.next_ids.tolist() != block.top_ids.tolist()


def test_features_are_what_enters_the_layers_in_ragged_chunks_and_shared_prefixes() -> None:
    ids, layers = random_ids(40, 9), (0, 2, 3)
    for decoder in decoders("llama"):
        store = make_store(decoder, feature_layers=layers)
        lm = PackedLM(decoder, store, head=HeadOptions(VOCAB), prefill_chunk=256)
        lm.open("a", ids)
        for stop in (7, 33, 40):
            lm.score([ScoreRequest("a", ids[:stop])])
        lm.close("a")
        other = np.append(ids[:25], random_ids(9, 1))
        lm.open("b", other)
        assert len(lm.features("b", other, 0)) == 25
        assert len(lm.features("b", other, 30)) == 0
        expected = stock_features(ids, layers)
        assert (lm.features("b", other, 0) - expected[:25]).abs().max() < 1e-3
        assert lm.open("c", ids) == 40  # copied from the row that "b" took over as it was
        assert (lm.features("c", ids, 3) - expected[3:]).abs().max() < 1e-3
        assert (lm.all_features(ids) - expected).abs().max() < 1e-3
