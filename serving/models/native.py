"""Builds and binds `kernels/`: CPU kernels compiled for this very processor, once, into the user's cache.

Where no compiler is found the kernels are simply absent (`load_native()` is None) and the Hugging Face modules
run instead: slower, and rows of a batch may differ in their last bits.
"""

import ctypes
from ctypes import byref
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serving.compiling import load_library
from serving.models.big_pages import BigPages
from serving.models.kv_store import KVStore
from serving.models.native_layers import (
    DraftsFields,
    KeptFields,
    LayerStack,
    Panels,
    SideFields,
    StepFields,
    WordsFields,
)
from serving.models.packed import PackedStep
from serving.types import WORTH_A_PASS, Draft, DraftStops

_SOURCE = Path(__file__).with_name("kernels") / "kernels.cpp"
_POINTER, _SIZE, _FLAG, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


@dataclass(frozen=True)
class DrawPlan:
    """n draws, column by column: the row each draws from, its sampling parameters and its noise keys [n, 2]."""

    rows: npt.NDArray[np.int64]
    temperatures: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    keys: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class HeadDrafts:
    """What a head says for T sequences: tokens [T, most] and their probabilities, of which `drafted` [T] count, and how
    many it thought of, `steps` [T].
    """

    tokens: npt.NDArray[np.int64]
    confidences: npt.NDArray[np.float32]
    drafted: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, num_sequences: int, most: int) -> "HeadDrafts":
        tokens, confidences = (np.zeros((num_sequences, most), dtype) for dtype in (np.int64, np.float32))
        return cls(tokens, confidences, np.zeros(num_sequences, np.int64), np.zeros(num_sequences, np.int64))

    def of(self, index: int) -> Draft:
        """What it drafts for one sequence."""
        count, num_passes = int(self.drafted[index]), int(self.steps[index])
        if count == 0:
            return Draft(num_passes=num_passes)
        tokens, confidences = self.tokens[index, :count].astype(np.int32), self.confidences[index, :count]
        return Draft(tokens, "eagle3", confidences, num_passes=num_passes)


class NativeKernels:
    """The kernels, on torch tensors. Activations are contiguous float32; T rows, K in, N out, D per head."""

    def __init__(self, library: ctypes.CDLL) -> None:
        p, n, f, r = _POINTER, _SIZE, _FLAG, _REAL
        self._pack = _bind(library.dh_pack, p, f, p, n, n)
        self._embed = _bind(library.dh_embed, p, f, p, p, n, n)
        self._pack_bytes = _bind(library.dh_pack_bytes, p, f, p, p, n, n)
        self._linear = _bind(library.dh_linear, p, p, f, p, p, p, n, n, n, f)
        self._rms_norm = _bind(library.dh_rms_norm, p, p, p, n, n, r)
        self._attend = _bind(library.dh_attend, p, n, p, p, f, p, p, p, n, n, n, n, n, r, n)
        self._swiglu = _bind(library.dh_swiglu, p, p, n, n)
        self._layers = _bind(library.dh_layers, p, n, p, p, p, p, p, p, p)
        self._joining_layer = _bind(library.dh_joining_layer, p, p, p, p, p, p, p, p)
        self._draft = _bind(library.dh_draft, p, p, p, p, p, p, p, p, p, n, p, p, p)
        self._scratch_size = library.dh_scratch_size
        self._scratch_size.argtypes, self._scratch_size.restype = [p, n], n
        self._columns = _bind(library.dh_columns, p, n, n, n, p, p, f, p, p)
        self._draw = _bind(library.dh_draw, p, n, n, p, n, p, p, p, p, p, p, p)
        self._log_sum_exp = _bind(library.dh_log_sum_exp, p, n, p, n, n)
        self.lanes: int = library.dh_lanes()
        self._panel: int = library.dh_panel()
        # Whether products of bfloat16 weights round their inputs to bfloat16, and take them in pairs.
        self.rounds_inputs = bool(library.dh_rounds_inputs())
        self._pages = BigPages()
        library.dh_reserve_threads(torch.get_num_threads())

    def pack(self, weight: Tensor) -> Panels:
        """weight[N, K], float32 or bfloat16, in panels; features up to a whole panel are zero.

        Raises ValueError for an odd K where bfloat16 inputs are multiplied in pairs.
        """
        num_rows, width = weight.shape
        if self.rounds_inputs and weight.dtype == torch.bfloat16 and width % 2:
            raise ValueError(f"weight: must have an even number of inputs, got {width}")
        values = self._pages.empty((-(-num_rows // self._panel) * self._panel, width), weight.dtype)
        source = weight.contiguous()
        self._pack(source.data_ptr(), source.dtype == torch.bfloat16, values.data_ptr(), num_rows, width)
        return Panels(values, num_rows)

    def pack_bytes(self, weight: Tensor) -> Panels:
        """weight[N, K] in panels of bytes, each row with a scale of its own and off by 0.4 % of its highest."""
        num_rows, width = weight.shape
        values = self._pages.empty((-(-num_rows // self._panel) * self._panel, width), torch.int8)
        scales, source = torch.empty(num_rows), weight.contiguous()
        self._pack_bytes(
            source.data_ptr(), source.dtype == torch.bfloat16, values.data_ptr(), scales.data_ptr(), num_rows, width
        )  # fmt: skip
        return Panels(values, num_rows, scales)

    def embed(self, table: Panels, ids: Tensor) -> Tensor:
        """float32 [T, K]: the rows `ids` i64[T] of a packed matrix."""
        out = torch.empty(ids.shape[0], table.width)
        self._embed(
            table.values.data_ptr(), table.is_bf16, ids.data_ptr(), out.data_ptr(), ids.shape[0], table.width
        )  # fmt: skip
        return out

    def linear(self, x: Tensor, weight: Panels, bias: Tensor | None, out: Tensor, *, add: bool = False) -> Tensor:
        """out[T, N] = (out if add) + x[T, K] @ weight[N, K].T + bias."""
        self._linear(
            x.data_ptr(), weight.values.data_ptr(), weight.is_bf16, _address(weight.scales), _address(bias),
            out.data_ptr(),
            x.shape[0], x.shape[1], weight.num_rows, add,
        )  # fmt: skip
        return out

    def columns(
        self, rows: Tensor, drawn: npt.NDArray[np.int64], draft: npt.NDArray[np.int64], *, with_logsumexp: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """What is read of the logits rows[T, V].

        Columns [T, 2]: the first of the highest, and the one emitted: `drawn` [T], or the highest again where that is
        below 0. Numbers [T, 4]: their logits, that of column `draft` [T], and the log-sum-exp if it is wanted.
        """
        count = rows.shape[0]
        columns, numbers = np.empty((count, 2), dtype=np.int64), np.empty((count, 4), dtype=np.float32)
        self._columns(
            rows.data_ptr(), rows.stride(0), count, rows.shape[1], drawn.ctypes.data, draft.ctypes.data,
            with_logsumexp, columns.ctypes.data, numbers.ctypes.data,
        )  # fmt: skip
        return columns, numbers

    def log_sum_exp(self, rows: Tensor) -> Tensor:
        """float32 [T] of rows[T, V]."""
        out = torch.empty(rows.shape[0])
        self._log_sum_exp(rows.data_ptr(), rows.stride(0), out.data_ptr(), rows.shape[0], rows.shape[1])
        return out

    def draw(self, rows: Tensor, plan: DrawPlan, ids: Tensor | None) -> Tensor:
        """i64[n]: the column drawn for each draw of `plan` from rows[T, V]; `ids` i32[V] are the columns' token ids."""
        picked = torch.empty(len(plan.rows), dtype=torch.int64)
        self._draw(
            rows.data_ptr(), rows.stride(0), rows.shape[1], plan.rows.ctypes.data, len(plan.rows),
            plan.temperatures.ctypes.data, plan.top_k.ctypes.data, plan.top_p.ctypes.data, plan.min_p.ctypes.data,
            plan.keys.ctypes.data, None if ids is None else ids.data_ptr(), picked.data_ptr(),
        )  # fmt: skip
        return picked

    def rms_norm(self, x: Tensor, weight: Tensor, out: Tensor, *, epsilon: float) -> Tensor:
        """Root-mean-square norm of each row of x[T, H]."""
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], epsilon)
        return out

    def layers(self, stack: LayerStack, hidden: Tensor, step: PackedStep, store: KVStore) -> None:
        """Run hidden[T, H] through every layer of `stack`, in place; the step's keys and values go into `store`.

        So does what enters the store's feature layers.
        """
        scratch = torch.empty(self._scratch_size(byref(stack.shape), step.num_tokens))
        places = StepFields(step.num_tokens, store.capacity, step.positions.data_ptr(), step.rows.data_ptr())
        keys, values = stack.caches(store)
        features = stack.features(store)
        self._layers(
            stack.layers, len(stack.layers), byref(stack.shape), byref(places), keys, values,
            None if features is None else byref(features), hidden.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip

    def joining_layer(
        self, stack: LayerStack, hidden: Tensor, side: SideFields, step: PackedStep, store: KVStore
    ) -> None:
        """Run hidden[T, H] in place through the one layer of `stack`, whose attention reads `side` too."""
        scratch = torch.empty(self._scratch_size(byref(stack.shape), step.num_tokens))
        places = StepFields(step.num_tokens, store.capacity, step.positions.data_ptr(), step.rows.data_ptr())
        stack.caches(store)
        self._joining_layer(
            stack.layers, byref(stack.shape), byref(places), store.keys[0].data_ptr(), store.values[0].data_ptr(),
            byref(side), hidden.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip

    def draft(
        self, stack: LayerStack, g: Tensor, side: SideFields, words: WordsFields, kept: Tensor, step: PackedStep,
        store: KVStore, stops: DraftStops,
    ) -> HeadDrafts:  # fmt: skip
        """Greedy drafts by a head's one layer, one a segment of `step`, whose N positions are read first, with g[N, H].

        What the layer says goes into kept[rows, size, H], at each position modulo `size`; g is overwritten.
        """
        said = HeadDrafts.empty(len(step.segments), int(stops.most.max(initial=1)))
        lengths = np.array([segment.stop - segment.start for segment in step.segments])
        scratch = torch.empty(self._scratch_size(byref(stack.shape), step.num_tokens))
        places = StepFields(step.num_tokens, store.capacity, step.positions.data_ptr(), step.rows.data_ptr())
        drafts = DraftsFields(
            lengths.ctypes.data, stops.most.ctypes.data, stops.floors.ctypes.data, stops.least, WORTH_A_PASS,
            said.tokens.shape[1], said.tokens.ctypes.data, said.confidences.ctypes.data, said.drafted.ctypes.data,
            said.steps.ctypes.data,
        )  # fmt: skip
        stack.caches(store)
        self._draft(
            stack.layers, byref(stack.shape), byref(places), store.keys[0].data_ptr(), store.values[0].data_ptr(),
            byref(side), byref(words), byref(KeptFields(kept.data_ptr(), kept.shape[1])), byref(drafts), len(lengths),
            step.ids.data_ptr(), g.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip
        return said

    def attend(
        self, qkv: Tensor, cache: tuple[Tensor, Tensor], places: tuple[Tensor, Tensor], out: Tensor,
        *, num_queries: int, scale: float, window: int = 0,
    ) -> Tensor:  # fmt: skip
        """Causal attention of every row over its own cache row; `places` are rows i64[T], positions i64[T].

        window > 0 limits it to that many last positions.
        """
        keys, values = cache
        self._attend(
            qkv.data_ptr(), qkv.stride(0), keys.data_ptr(), values.data_ptr(), keys.dtype == torch.bfloat16,
            places[0].data_ptr(), places[1].data_ptr(), out.data_ptr(), qkv.shape[0], num_queries,
            keys.shape[1], keys.shape[3], keys.shape[2], scale, window,
        )  # fmt: skip
        return out

    def swiglu(self, gate_up: Tensor, out: Tensor) -> Tensor:
        """out[T, I] = silu(gate) * up of gate_up[T, 2 I]."""
        self._swiglu(gate_up.data_ptr(), out.data_ptr(), out.shape[0], out.shape[1])
        return out


@cache
def load_native() -> NativeKernels | None:
    """The kernels for this machine, compiled on first use (seconds); None where impossible or DRAFTHOUSE_NATIVE=0."""
    library = load_library(_SOURCE, otherwise="decoding falls back to slower torch kernels")
    return None if library is None else NativeKernels(library)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _bind(function: "ctypes._NamedFuncPointer", *types: type) -> "ctypes._NamedFuncPointer":
    function.argtypes = list(types)
    function.restype = None
    return function
