"""Small steps captured once and replayed: on a GPU most of a small model's pass is launching kernels, a graph is one.

A captured step has a fixed number of tokens. A smaller one is padded with a sequence of its own, in the store's spare
row, and has as many empty sequences as rows are not in it.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from serving.models.kv_store import KVShape, KVStore
from serving.models.packed import LayeredDecoder, PackedStep, Ragged, StepArrays, step_arrays

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # tokens; larger steps are worth their launches
_MOST_TRIES = 3  # of capturing a size for which there was no memory


class Recorder(Protocol):
    """Keeps a computation on tensors that stay where they are."""

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """What repeats `run`, and the tensor that each time holds its result. RuntimeError where it cannot be kept."""
        ...


_recording = Lock()  # a process captures one graph at a time


class CudaRecorder:
    """CUDA graphs, which share their memory: one is replayed at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._aside = torch.cuda.Stream()  # one for all graphs: libraries keep a workspace for each stream

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        usual, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        with _recording:
            try:
                self._aside.wait_stream(usual)
                with torch.cuda.stream(self._aside):
                    run()  # what libraries set up on first use must not be captured
                # Other threads of this process use the GPU meanwhile.
                with torch.cuda.graph(graph, self._pool, self._aside, capture_error_mode="thread_local"):
                    out = run()
            finally:  # a capture that fails leaves its stream behind as the current one
                torch.cuda.set_stream(usual)
                usual.wait_stream(self._aside)
        return graph.replay, out


@dataclass(frozen=True)
class _Captured:
    """One size over one store: arrays that a step is written to, what then runs, and the hidden states [size, H]."""

    store: KVStore
    flat: Tensor
    bounds: Tensor
    replay: Callable[[], object]
    hidden: Tensor


class GraphedDecoder:
    """Implements LayeredDecoder: runs `decoder`, its small steps over a store with flash attention from graphs.

    One whose code cannot be captured is run as it is, with a warning.
    """

    def __init__(self, decoder: LayeredDecoder, recorder: Recorder) -> None:
        self._decoder = decoder
        self._recorder = recorder
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._short_of_memory: Counter[tuple[int, int]] = Counter()
        self._can_be_captured = True

    def keeping(self, kept: Sequence[int]) -> "GraphedDecoder":
        return GraphedDecoder(self._decoder.keeping(kept), self._recorder)

    @property
    def shapes(self) -> list[KVShape]:
        return self._decoder.shapes

    @property
    def num_bytes(self) -> int:
        return self._decoder.num_bytes

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)

    def forward(self, step: PackedStep, store: KVStore) -> Tensor:
        size = next((size for size in SIZES if size >= step.num_tokens), None)
        if size is None or step.ragged is None or not self._can_be_captured:
            return self._decoder.forward(step, store)
        arrays = _padded(step_arrays(step.segments), size, num_rows=store.num_rows)
        key = (id(store), size)
        if self._short_of_memory[key] >= _MOST_TRIES:
            return self._decoder.forward(step, store)
        if key not in self._captured:
            try:
                self._captured[key] = self._capture(arrays, store)
            except torch.OutOfMemoryError:  # for the moment, perhaps
                self._short_of_memory[key] += 1
                if self._short_of_memory[key] == _MOST_TRIES:
                    log.warning("steps of up to %d tokens are not captured, there is no memory for them", size)
                return self._decoder.forward(step, store)
            except RuntimeError as error:  # torch's word for what cannot be captured
                log.warning("steps are not captured, this model's code does not allow it: %s", error)
                self._can_be_captured = False
                return self._decoder.forward(step, store)
        captured = self._captured[key]
        captured.flat.copy_(torch.from_numpy(arrays.flat))
        captured.bounds.copy_(torch.from_numpy(arrays.bounds))
        captured.replay()
        return captured.hidden[: step.num_tokens].clone()  # the next replay writes over it

    def _capture(self, arrays: StepArrays, store: KVStore) -> _Captured:
        flat = torch.from_numpy(arrays.flat).to(store.device)
        bounds = torch.from_numpy(arrays.bounds).to(store.device)
        starts, used, rows = bounds.split(arrays.sizes)
        step = PackedStep(flat[0], flat[1], flat[2], (), Ragged(starts, used, rows[:, None], flat.shape[1]))
        replay, hidden = self._recorder.record(lambda: self._decoder.forward(step, store))
        return _Captured(store, flat, bounds, replay, hidden)


def _padded(arrays: StepArrays, size: int, *, num_rows: int) -> StepArrays:
    """`arrays` of `size` tokens in num_rows + 1 sequences, the last of which is all padding in row `num_rows`."""
    starts, used, rows = arrays.split()
    num_tokens, num_empty = arrays.flat.shape[1], num_rows - len(rows)
    places = np.arange(size - num_tokens)
    padding = np.stack([np.zeros_like(places), places, np.full_like(places, num_rows)])
    return StepArrays.of(
        np.concatenate([arrays.flat, padding], axis=1),
        starts=[*starts, *[num_tokens] * num_empty, size],
        used=[*used, *[0] * num_empty, len(places)],
        rows=[*rows, *[num_rows] * (num_empty + 1)],
    )
