"""Weights in the form that the native kernels take: matrices in panels, layers as C structures (kernels/layer.h)."""

from collections.abc import Sequence
from ctypes import Array, Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serving.models.kv_store import KVStore


@dataclass(frozen=True)
class Panels:
    """A matrix w[num_rows, width] as the kernels store it, panel by panel."""

    values: Tensor
    num_rows: int
    scales: Tensor | None = None  # float32 [num_rows] where `values` are bytes

    @property
    def width(self) -> int:
        return self.values.shape[1]

    @property
    def is_bf16(self) -> bool:
        return self.values.dtype == torch.bfloat16


class LayerFields(Structure):
    """`struct Layer`: pointers to panels and float32 vectors, null where a layer has none."""

    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "out", "gate_up", "down", "qkv_bias", "out_bias")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        ("window", c_int64),
    ]  # fmt: skip


class ShapeFields(Structure):
    """`struct Shape`: what all layers of a model have in common."""

    _fields_ = [
        *((name, c_int64) for name in ("hidden", "num_queries", "num_keys", "head_dim", "intermediate")),
        ("weights_are_bf16", c_int64),
        ("cache_is_bf16", c_int64),
        ("epsilon", c_float),
        ("scale", c_float),
        ("cos", c_void_p),
        ("sin", c_void_p),
    ]  # fmt: skip


class SideFields(Structure):
    """`struct Side`: a second stream float32 [T, H] for a layer that reads two, and the norm of the hidden one."""

    _fields_ = [("x", c_void_p), ("hidden_norm", c_void_p), ("residual_is_normed", c_int64)]


class WordsFields(Structure):
    """`struct Words`: panels of embedding and head rows, the latter's scales or null, the norm before them, i64 target
    ids and their number.
    """

    _fields_ = [
        *((name, c_void_p) for name in ("embedding", "lm_head", "scales", "norm", "target_ids")),
        ("size", c_int64),
    ]


class KeptFields(Structure):
    """`struct Kept`: a head's outputs at its last positions, float32 [rows, size, H]."""

    _fields_ = [("outputs", c_void_p), ("size", c_int64)]


class DraftsFields(Structure):
    """`struct Drafts`: what is asked of each sequence, and where what came of it goes."""

    _fields_ = [
        *((name, c_void_p) for name in ("lengths", "most", "floors")),
        *((name, c_float) for name in ("least", "worth_a_pass")),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("tokens", "confidences", "drafted", "steps")),
    ]


class FeaturesFields(Structure):
    """`struct Features`: slots of `width` numbers, and i64 where a layer's input begins in them, -1 for nowhere."""

    _fields_ = [("slots", c_void_p), ("width", c_int64), ("offsets", c_void_p)]


class StepFields(Structure):
    """`struct Step`: the flat arrays of one packed step."""

    _fields_ = [
        ("num_tokens", c_int64),
        ("capacity", c_int64),
        ("positions", c_void_p),
        ("rows", c_void_p),
    ]  # fmt: skip


@dataclass(frozen=True)
class NativeLayer:
    """Weights of one layer; norms and biases are float32. window 0 means full attention."""

    qkv: Panels
    qkv_bias: Tensor | None
    out: Panels
    out_bias: Tensor | None
    gate_up: Panels
    down: Panels
    input_norm: Tensor
    post_norm: Tensor
    head_norms: tuple[Tensor, Tensor] | None
    window: int

    @property
    def matrices(self) -> tuple[Panels, ...]:
        return (self.qkv, self.out, self.gate_up, self.down)

    @property
    def fields(self) -> LayerFields:
        q_norm, k_norm = self.head_norms or (None, None)
        return LayerFields(
            *(panels.values.data_ptr() for panels in self.matrices),
            *(_pointer(one) for one in (self.qkv_bias, self.out_bias, self.input_norm, self.post_norm)),
            _pointer(q_norm), _pointer(k_norm), self.window,
        )  # fmt: skip


@dataclass(frozen=True)
class Geometry:
    """What the layers of a model have in common; rope is cos and sin, float32 [positions, head_dim]."""

    hidden: int
    num_queries: int
    num_keys: int
    head_dim: int
    intermediate: int
    epsilon: float
    rope: tuple[Tensor, Tensor]


class LayerStack:
    """Layers in the order they run, for one store's dtype; keeps what its pointers point to."""

    def __init__(self, layers: Sequence[NativeLayer], geometry: Geometry) -> None:
        self._kept = (list(layers), geometry)
        self.layers: Array[LayerFields] = (LayerFields * len(layers))(*(layer.fields for layer in layers))
        g = geometry
        self.shape = ShapeFields(
            g.hidden, g.num_queries, g.num_keys, g.head_dim, g.intermediate, layers[0].qkv.is_bf16, False,
            g.epsilon, g.head_dim**-0.5, g.rope[0].data_ptr(), g.rope[1].data_ptr(),
        )  # fmt: skip
        self._store: KVStore | None = None
        self._caches: tuple[Any, Any] = (None, None)
        self._featured: KVStore | None = None
        self._features: FeaturesFields | None = None

    def caches(self, store: KVStore) -> tuple[Any, Any]:
        """Pointers to the keys and the values of each layer in `store`."""
        if store is not self._store:
            pointers = c_void_p * len(self.layers)
            self._store = store
            keys, values = ([part.data_ptr() for part in parts] for parts in (store.keys, store.values))
            self._caches = pointers(*keys), pointers(*values)
            self.shape.cache_is_bf16 = store.dtype == torch.bfloat16
        return self._caches

    def features(self, store: KVStore) -> FeaturesFields | None:
        """Where `store` keeps what enters its feature layers; None where it has none."""
        if store.feature_layers and store is not self._featured:
            self._featured = store
            self._offsets = np.full(len(self.layers) + 1, -1)
            self._offsets[list(store.feature_layers)] = np.arange(len(store.feature_layers)) * store.hidden
            width = store.features.shape[2]
            self._features = FeaturesFields(store.features.data_ptr(), width, self._offsets.ctypes.data)
        return self._features if store.feature_layers else None


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
