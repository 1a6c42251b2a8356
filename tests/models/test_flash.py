"""The path of a GPU, on a CPU: stand-ins do as torch documents its flash kernel and CUDA graphs.

Whether a card's own kernel agrees is tried where it is loaded (`has_flash`).
"""

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from serving.models import attention, loading
from serving.models.attention import PAGE, flash_error, has_flash
from serving.models.graphs import SIZES, GraphedDecoder
from serving.models.hf_decoder import HFDecoder
from serving.models.kv_store import KVShape, KVStore
from serving.models.loading import LoadOptions
from serving.models.packed import LayeredDecoder
from serving.models.packed_lm import HeadOptions, PackedLM
from serving.models.slim import slim_in_place
from serving.protocols import ScoreRequest
from serving.types import Ids
from tests.models.tiny import VOCAB, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
    num_splits: int | None,
) -> Tensor:  # fmt: skip
    """`varlen_attn` over a pool of pages, by its documentation and FlashAttention-2's checks.

    Causal masks are aligned at the end.
    """
    assert (enable_gqa, num_splits, window_size[1]) == (True, 1, 0)
    assert cu_seq_k is not None
    assert cu_seq_k.shape == cu_seq_q.shape
    assert all(one.dtype == torch.int32 for one in (cu_seq_q, cu_seq_k, seqused_k, block_table))
    assert all(one.is_contiguous() for one in (cu_seq_q, cu_seq_k, seqused_k))
    assert all(one.stride(-1) == 1 for one in (query, key, value, block_table))
    assert (cu_seq_q.shape, block_table.shape) == ((len(seqused_k) + 1,), (len(seqused_k), 1))
    assert (int(cu_seq_q[-1]), max_k, max_k % 256) == (len(query), key.shape[1], 0)
    out = torch.full_like(query, torch.nan)
    for n, used in enumerate(seqused_k.tolist()):
        start, stop = int(cu_seq_q[n]), int(cu_seq_q[n + 1])
        assert 0 <= stop - start <= max_q
        assert used <= max_k
        page = int(block_table[n, 0])
        group = query.shape[1] // key.shape[2]
        keys, values = (pool[page, :used].repeat_interleave(group, 1) for pool in (key, value))
        for i in range(start, stop):
            last = used - (stop - i)
            first = 0 if window_size[0] < 0 else max(0, last - window_size[0])
            scores = torch.einsum("hd,khd->hk", query[i], keys[first : last + 1]) * scale
            out[i] = torch.einsum("hk,khd->hd", scores.softmax(-1), values[first : last + 1])
    return out


class Again:
    """Runs what it was given anew, each time to the same place."""

    def __init__(self) -> None:
        self.recorded: list[int] = []

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        out = run()
        self.recorded.append(len(out))
        return lambda: out.copy_(run()), out


class Never:
    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture(autouse=True)
def _documented_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "varlen_attn", varlen)
    attention._num_splits.cache_clear()
    yield
    attention._num_splits.cache_clear()


def make_lm(decoder: LayeredDecoder, *, flash: bool, features: tuple[int, ...] = ()) -> PackedLM:
    store = KVStore(
        decoder.shapes, 4, PAGE, torch.float32, feature_layers=features, hidden=64 if features else 0, has_flash=flash
    )
    return PackedLM(decoder, store, head=HeadOptions(VOCAB), prefill_chunk=PAGE)


def random_ids(length: int, seed: int) -> Ids:
    return np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)


def script(lm: PackedLM) -> list[tuple[list[int], list[float]]]:
    """Prompts of different lengths, a draft each, a rollback, a session that ends and one that takes its row."""
    texts = {str(seed): random_ids(40 + 30 * seed, seed) for seed in range(3)}
    found: list[tuple[list[int], list[float]]] = []

    def score(*asked: tuple[str, int, int]) -> None:
        for table in lm.score([ScoreRequest(key, texts[key][:length], num_rows=rows) for key, length, rows in asked]):
            assert table is not None
            found.append((table.next_ids.tolist(), table.next_logits.tolist()))

    for key, ids in texts.items():
        lm.open(key, ids)
    score(("0", 20, 1), ("1", 25, 1), ("2", 3, 1))
    score(("0", 25, 5), ("1", 26, 1), ("2", 90, 2))
    lm.rollback("0", 22)
    score(("0", 24, 2), ("1", 30, 4))
    lm.close("1")
    texts["new"] = random_ids(50, 9)
    lm.open("new", texts["new"])
    score(("new", 45, 1), ("0", 40, 3), ("2", 91, 1))
    lm.store.check_integrity()
    return found


def same(found: list[Any], expected: list[Any]) -> None:
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, logits), (_, wanted) in zip(found, expected, strict=True):
        np.testing.assert_allclose(logits, wanted, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2"])
def test_flash_and_replayed_steps_say_what_attention_by_segments_says(family: str) -> None:
    network, recorder = tiny_model(family), Again()
    expected = script(make_lm(HFDecoder(copy.deepcopy(network)), flash=False))
    same(script(make_lm(HFDecoder(copy.deepcopy(network)), flash=True)), expected)
    same(script(make_lm(GraphedDecoder(HFDecoder(network), recorder), flash=True)), expected)
    assert bool(recorder.recorded) == (family != "gemma2")  # its soft cap is no part of the kernel
    assert set(recorder.recorded) <= set(SIZES)
    assert len(recorder.recorded) == len(set(recorder.recorded))  # each size once


def test_replayed_steps_keep_the_features_of_their_own_slots_alone() -> None:
    network, features = tiny_model("llama"), (1, 2)
    plain = make_lm(HFDecoder(copy.deepcopy(network)), flash=False, features=features)
    graphed = make_lm(GraphedDecoder(HFDecoder(network), Again()), flash=True, features=features)
    for lm in (plain, graphed):
        script(lm)
    for key, seed in (("0", 0), ("new", 9)):
        ids = random_ids(40 if seed == 0 else 45, seed)
        torch.testing.assert_close(graphed.features(key, ids, 0), plain.features(key, ids, 0), atol=1e-3, rtol=0)


def test_larger_steps_and_those_without_flash_are_run_as_they_are() -> None:
    recorder = Again()
    lm = make_lm(GraphedDecoder(HFDecoder(tiny_model("llama")), recorder), flash=True)
    ids = random_ids(SIZES[-1] + 1, 1)
    lm.open("long", ids)
    lm.score([ScoreRequest("long", ids)])
    lm = make_lm(GraphedDecoder(HFDecoder(tiny_model("llama")), recorder), flash=False)
    lm.open("short", ids[:5])
    lm.score([ScoreRequest("short", ids[:5])])
    assert recorder.recorded == []


def test_a_model_that_cannot_be_captured_is_run_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    network = tiny_model("llama")
    expected = script(make_lm(HFDecoder(copy.deepcopy(network)), flash=False))
    with caplog.at_level(logging.WARNING):
        same(script(make_lm(GraphedDecoder(HFDecoder(network), Never()), flash=True)), expected)
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # once, not each step
    assert "not captured" in caplog.text


def test_fewer_layers_of_a_replayed_decoder_are_captured_apart() -> None:
    network = tiny_model("llama", num_hidden_layers=4)
    expected = script(slim_in_place(make_lm(HFDecoder(copy.deepcopy(network)), flash=False), (0, 3)))
    recorder = Again()
    graphed = make_lm(GraphedDecoder(HFDecoder(network), recorder), flash=True)
    script(graphed)
    whole = len(recorder.recorded)
    same(script(slim_in_place(graphed, (0, 3))), expected)
    assert len(recorder.recorded) == 2 * whole


def test_a_trial_tells_a_kernel_that_agrees_from_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash_error(KVShape(3, 64), 2 * PAGE, torch.float32, CPU) < 1e-4

    def late(query: Tensor, *args: Any, seqused_k: Tensor, **kwargs: Any) -> Tensor:
        return varlen(query, *args, seqused_k=(seqused_k - 1).clamp(min=0), **kwargs)

    monkeypatch.setattr(attention, "varlen_attn", late)
    assert flash_error(KVShape(3, 64), 2 * PAGE, torch.float32, CPU) > 0.1


def test_where_nobody_may_choose_the_splits_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def choosing(*args: Any, num_splits: int | None, **kwargs: Any) -> Tensor:
        if num_splits is not None:
            raise RuntimeError("num_splits requires FA3")
        return varlen(*args, num_splits=1, **kwargs)

    monkeypatch.setattr(attention, "varlen_attn", choosing)
    assert flash_error(KVShape(3, 64), 2 * PAGE, torch.float32, CPU) < 1e-4


def test_rows_on_a_gpu_are_whole_pages_and_one_more_where_flash_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(dtype: str) -> tuple[int, int]:
        options = LoadOptions("target", dtype, num_rows=4, max_length=1024, prefill_chunk=64, vocab_size=9, max_draft=4)
        return options.capacity, options.kv_rows

    assert sizes("bfloat16") == (1029, 4)
    monkeypatch.setattr(loading, "default_device", lambda: torch.device("cuda"))
    assert sizes("bfloat16") == (1280, 5)
    assert sizes("float32") == (1029, 4)


def test_memory_that_is_short_for_a_moment_does_not_end_capturing() -> None:
    class Short(Again):
        def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
            if not self.recorded:
                self.recorded.append(0)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().record(run)

    network, recorder = tiny_model("llama"), Short()
    expected = script(make_lm(HFDecoder(copy.deepcopy(network)), flash=False))
    same(script(make_lm(GraphedDecoder(HFDecoder(network), recorder), flash=True)), expected)
    assert len(recorder.recorded) > 1


def test_memory_that_stays_short_is_not_asked_for_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    class Full(Again):
        def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
            self.recorded.append(len(run()))
            raise torch.OutOfMemoryError("CUDA out of memory")

    network, recorder = tiny_model("llama"), Full()
    expected = script(make_lm(HFDecoder(copy.deepcopy(network)), flash=False))
    graphed = make_lm(GraphedDecoder(HFDecoder(network), recorder), flash=True)
    same(script(graphed), expected)
    for _ in range(5):
        graphed.rollback("0", 39)
        graphed.score([ScoreRequest("0", random_ids(40, 0))])
    assert max(map(recorder.recorded.count, recorder.recorded)) == 3
    assert "steps of up to 1 tokens are not captured" in caplog.text


def test_there_is_no_flash_attention_on_a_cpu() -> None:
    assert not has_flash([KVShape(3, 64)], PAGE, torch.bfloat16, CPU)


def off_by(error: float) -> Callable[..., Tensor]:
    def kernel(*args: Any, window_size: tuple[int, int], **kwargs: Any) -> Tensor:
        return varlen(*args, window_size=window_size, **kwargs) + (error if window_size[0] >= 0 else 0.0)

    return kernel


def refusing(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (varlen, None),
        (off_by(0.5), "flash attention is off by 0.500"),
        (off_by(float("nan")), "flash attention is off by nan"),
        (refusing, "no flash attention here, sequences attend one by one: no kernel image"),
    ],
)
def test_a_kernel_is_used_where_it_agrees_and_else_the_log_says_why(
    kernel: Callable[..., Tensor], said: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "may_flash", lambda dtype, device: True)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    assert has_flash([KVShape(3, 64), KVShape(1, 64)], PAGE, torch.float32, CPU) == (said is None)
    assert (said or "") in caplog.text
