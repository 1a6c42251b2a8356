"""How an EAGLE-3 head is run over packed steps: on the native CPU kernels, or by torch anywhere.

T packed positions; H hidden size of the head, F features a position, Vd draft vocabulary.
"""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from serving.models.attention import attend_packed
from serving.models.eagle3 import Eagle3Head
from serving.models.kv_store import KVShape, KVStore
from serving.models.native import HeadDrafts, NativeKernels, load_native
from serving.models.native_layers import Geometry, LayerStack, NativeLayer, Panels, SideFields, WordsFields
from serving.models.packed import PackedStep
from serving.types import DraftStops


class Eagle3Runner(Protocol):
    """The parts of a head."""

    def project(self, features: Tensor) -> Tensor:
        """g [T, H] of features [T, F]."""
        ...

    def forward(self, g: Tensor, step: PackedStep, store: KVStore) -> Tensor:
        """The layer's output [T, H]; `step.ids` are the tokens behind each position. May write over g."""
        ...

    def logits(self, out: Tensor) -> Tensor:
        """float32 [T, Vd]"""
        ...


@runtime_checkable
class DraftingRunner(Eagle3Runner, Protocol):
    """One that takes all steps of a draft at once."""

    def draft(self, g: Tensor, kept: Tensor, step: PackedStep, store: KVStore, stops: DraftStops) -> HeadDrafts:
        """Greedy drafts, one a segment of `step`, which is read first as by `forward`.

        The outputs of each segment's last position and of all steps go into kept[row, position % its size].
        """
        ...


def runner_of(head: Eagle3Head, *, max_length: int) -> Eagle3Runner:
    """The fastest that this machine has for `head`."""
    kernels = load_native()
    if kernels is not None and _fits(head, kernels):
        return NativeEagle3(head, kernels, max_length=max_length)
    return TorchEagle3(head, max_length=max_length)


def kv_shape(head: Eagle3Head) -> KVShape:
    """The cache of the one layer."""
    return KVShape(head.config.layer.num_key_value_heads, head.config.head_dim)


class TorchEagle3:
    """By the head's own modules, on its device."""

    def __init__(self, head: Eagle3Head, *, max_length: int) -> None:
        self._head = head
        self._rotary = tuple(table.to(head.fc.weight.device) for table in head.rotary(max_length))

    def project(self, features: Tensor) -> Tensor:
        g: Tensor = self._head.fc(features.to(self._head.fc.weight))
        return g

    def forward(self, g: Tensor, step: PackedStep, store: KVStore) -> Tensor:
        head, attention, dim = self._head, self._head.midlayer.self_attn, self._head.config.head_dim
        joined, residual = head.layer_input(F.embedding(step.ids, head.embedding), g)
        query, key, value = (
            project(joined).view(1, len(g), -1, dim).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cos, sin = (table[step.positions][None].to(g.dtype) for table in self._rotary)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        mixed = attend_packed(step, (store.keys[0], store.values[0]), query, key, value, scale=dim**-0.5)
        return head.layer_output(residual, mixed.reshape(len(g), -1))

    def logits(self, out: Tensor) -> Tensor:
        return self._head.logits(out).float()


class NativeEagle3:
    """On the CPU kernels: weights packed in their dtype, those of bfloat16 logits in bytes; activations float32."""

    def __init__(self, head: Eagle3Head, kernels: NativeKernels, *, max_length: int) -> None:
        config, layer = head.config, head.midlayer
        self._kernels = kernels
        self._fc, self._embedding = kernels.pack(head.fc.weight), kernels.pack(head.embedding)
        # More than half of what a step reads. The order of its logits, all that a draft is made of, hardly feels it.
        is_float = head.lm_head.dtype == torch.float32
        self._lm_head = kernels.pack(head.lm_head) if is_float else kernels.pack_bytes(head.lm_head)
        self._norm, self._hidden_norm = head.norm.weight.float(), layer.hidden_norm.weight.float()
        self._target_ids = head.target_ids.contiguous()
        self._words = WordsFields(
            self._embedding.values.data_ptr(), self._lm_head.values.data_ptr(),
            None if self._lm_head.scales is None else self._lm_head.scales.data_ptr(), self._norm.data_ptr(),
            self._target_ids.data_ptr(), len(self._target_ids),
        )  # fmt: skip
        self._epsilon = float(config.layer.rms_norm_eps)
        self._side_is_residual = config.norm_before_residual
        geometry = Geometry(
            hidden=config.hidden_size,
            num_queries=config.layer.num_attention_heads,
            num_keys=config.layer.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate=config.layer.intermediate_size,
            epsilon=self._epsilon,
            rope=head.rotary(max_length),
        )
        self._stack = LayerStack([_native_layer(head, kernels)], geometry)

    def project(self, features: Tensor) -> Tensor:
        return self._linear(features.float().contiguous(), self._fc)

    def forward(self, g: Tensor, step: PackedStep, store: KVStore) -> Tensor:
        embedded = self._kernels.embed(self._embedding, step.ids)
        self._kernels.joining_layer(self._stack, g, self._side(embedded), step, store)
        return g

    def draft(self, g: Tensor, kept: Tensor, step: PackedStep, store: KVStore, stops: DraftStops) -> HeadDrafts:
        return self._kernels.draft(self._stack, g, self._side(None), self._words, kept, step, store, stops)

    def _side(self, embedded: Tensor | None) -> SideFields:
        x = None if embedded is None else embedded.data_ptr()
        return SideFields(x, self._hidden_norm.data_ptr(), self._side_is_residual)

    def logits(self, out: Tensor) -> Tensor:
        normed = self._kernels.rms_norm(out, self._norm, torch.empty_like(out), epsilon=self._epsilon)
        return self._linear(normed, self._lm_head)

    def _linear(self, x: Tensor, weight: Panels) -> Tensor:
        return self._kernels.linear(x, weight, None, x.new_empty(x.shape[0], weight.num_rows))


def _native_layer(head: Eagle3Head, kernels: NativeKernels) -> NativeLayer:
    attention, mlp = head.midlayer.self_attn, head.midlayer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    bias = None if projections[0].bias is None else torch.cat([p.bias.float() for p in projections])
    return NativeLayer(
        qkv=kernels.pack(torch.cat([p.weight for p in projections])),
        qkv_bias=bias,
        out=kernels.pack(attention.o_proj.weight),
        out_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.float(),
        gate_up=kernels.pack(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])),
        down=kernels.pack(mlp.down_proj.weight),
        input_norm=head.midlayer.input_layernorm.weight.float(),
        post_norm=head.midlayer.post_attention_layernorm.weight.float(),
        head_norms=None,
        window=0,
    )


def _fits(head: Eagle3Head, kernels: NativeKernels) -> bool:
    config = head.config
    sizes = (config.hidden_size, config.layer.intermediate_size, config.head_dim)
    on_cpu = head.fc.weight.device.type == "cpu"
    return (
        on_cpu and all(size % kernels.lanes == 0 for size in sizes) and config.target_hidden_size % kernels.lanes == 0
    )
