"""Llama-shaped decoders on the native CPU kernels: fused projections, no padding, one call for all layers.

Covers models made of RMSNorm, rotary grouped-query attention and SwiGLU: Llama, Mistral, Qwen2, Qwen3. Anything
else runs through `hf_decoder`. T packed rows, H hidden, Q query heads, KV key heads, D per head, I intermediate.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from serving.models.kv_store import KVShape, KVStore
from serving.models.native import NativeKernels
from serving.models.native_layers import Geometry, LayerStack, NativeLayer
from serving.models.packed import Network, PackedStep
from serving.models.skipping import kept_layers

_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
_MAX_HEAD_DIM = 256


def supports(model: Network, kernels: NativeKernels) -> bool:
    """Whether `model` (a Hugging Face causal LM on the CPU) has exactly the shape these kernels compute."""
    config = model.config
    if config.model_type not in _FAMILIES or config.hidden_act != "silu" or getattr(config, "mlp_bias", False):
        return False
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    sizes = (config.hidden_size, config.intermediate_size, _head_dim(config))
    fits = all(size % kernels.lanes == 0 for size in sizes) and _head_dim(config) <= _MAX_HEAD_DIM
    return fits and rope in _STATIC_ROPE and model.get_input_embeddings().weight.device.type == "cpu"


def _head_dim(config: Network) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


class NativeDecoder:
    """Weights of one model, fused, in their dtype; activations float32."""

    def __init__(self, model: Network, kernels: NativeKernels, *, max_length: int) -> None:
        config = model.config
        embedding, head = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()
        self._kernels = kernels
        self._embedding = kernels.pack(embedding)
        self._head = self._embedding if head.data_ptr() == embedding.data_ptr() else kernels.pack(head)
        self._norm = _float(model.model.norm.weight)
        self._layers = {index: _fused(layer, kernels) for index, layer in kept_layers(model.model).items()}
        self._geometry = Geometry(
            hidden=config.hidden_size,
            num_queries=config.num_attention_heads,
            num_keys=config.num_key_value_heads,
            head_dim=_head_dim(config),
            intermediate=config.intermediate_size,
            epsilon=config.rms_norm_eps,
            rope=_rope_tables(model.model.rotary_emb, max_length),
        )
        self._stack = LayerStack(list(self._layers.values()), self._geometry)

    def keeping(self, kept: Sequence[int]) -> "NativeDecoder":
        slim = copy.copy(self)
        slim._layers = {index: self._layers[index] for index in kept}
        slim._stack = LayerStack(list(slim._layers.values()), self._geometry)
        return slim

    @property
    def shapes(self) -> list[KVShape]:
        return [KVShape(self._geometry.num_keys, self._geometry.head_dim)] * len(self._layers)

    @property
    def num_bytes(self) -> int:
        weights = [self._embedding] + ([] if self._head is self._embedding else [self._head])
        for layer in self._layers.values():
            weights += layer.matrices
        return sum(weight.values.nbytes for weight in weights)

    def forward(self, step: PackedStep, store: KVStore) -> Tensor:
        hidden = self._kernels.embed(self._embedding, step.ids)
        self._kernels.layers(self._stack, hidden, step, store)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        normed = self._kernels.rms_norm(hidden, self._norm, torch.empty_like(hidden), epsilon=self._geometry.epsilon)
        return self._kernels.linear(normed, self._head, None, hidden.new_empty(hidden.shape[0], self._head.num_rows))


def _fused(layer: Network, kernels: NativeKernels) -> NativeLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    has_bias = projections[0].bias is not None
    norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
    return NativeLayer(
        qkv=kernels.pack(torch.cat([p.weight.detach() for p in projections])),
        qkv_bias=torch.cat([_float(p.bias) for p in projections]) if has_bias else None,
        out=kernels.pack(attention.o_proj.weight.detach()),
        out_bias=None if attention.o_proj.bias is None else _float(attention.o_proj.bias),
        gate_up=kernels.pack(torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()])),
        down=kernels.pack(mlp.down_proj.weight.detach()),
        input_norm=_float(layer.input_layernorm.weight),
        post_norm=_float(layer.post_attention_layernorm.weight),
        head_norms=None if norms is None else (_float(norms[0].weight), _float(norms[1].weight)),
        window=_window(attention),
    )


def _window(attention: Network) -> int:
    """Sliding window of one layer, 0 for none: the layer's own where it has one, else the whole model's (Mistral)."""
    whole_model = getattr(attention.config, "sliding_window", None)
    return int(getattr(attention, "sliding_window", whole_model) or 0)


def _rope_tables(rotary: Network, max_length: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [max_length, D], from the model's own rotary embedding."""
    positions = torch.arange(max_length)[None]
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), positions)
    return cos[0].contiguous(), sin[0].contiguous()


def _float(parameter: Tensor) -> Tensor:
    return parameter.detach().float().contiguous()
