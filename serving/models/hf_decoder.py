"""Any Hugging Face causal LM over packed steps, by way of a custom attention function.

The model's own code runs on one row [1, T] with explicit positions; attention alone is ours: it stores keys and
values in the KV store and attends over it (`attention`).
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from serving.errors import ModelError
from serving.models.attention import attend_packed
from serving.models.kv_store import KVShape, KVStore
from serving.models.packed import Network, PackedStep
from serving.models.skipping import keeping, kept_layers

ATTENTION = "drafthouse_packed"
_EXACT_LAYERS = frozenset({"full_attention", "sliding_attention"})
_SUPPORTED = "supported are causal LMs whose decoder has `layers` with `self_attn` of `k_proj` or `qkv_proj`"


class _Context:
    """The step that is running; attention layers of one model find it through the model's config.

    `slots` is where in `store` a layer's cache lies, by the layer's original index; `attended` are the layers that
    have asked for attention, one entry a call.
    """

    step: PackedStep
    store: KVStore
    slots: dict[int, int]
    attended: list[int]


_contexts: WeakValueDictionary[int, _Context] = WeakValueDictionary()


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [1, Q, T, D], key and value [1, KV, T, D] -> [1, T, Q, D]; honours sliding_window and softcap."""
    context = _contexts[id(module.config)]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    context.attended.append(layer)
    slot = context.slots[layer]
    caches = context.store.keys[slot], context.store.values[slot]
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    window, softcap = options.get("sliding_window") or 0, options.get("softcap") or 0.0
    mixed = attend_packed(context.step, caches, query, key, value, scale=scale, window=window, softcap=softcap)
    return mixed[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)


class HFDecoder:
    """Runs the model's own modules; `check_layers` must have passed its config."""

    def __init__(self, model: Network) -> None:
        model.set_attn_implementation(ATTENTION)
        self._decoder, self._head = model.get_decoder(), model.lm_head
        self._text_config = model.config.get_text_config()
        self._context = _Context()
        _contexts[id(self._text_config)] = self._context
        self._shapes = dict(zip(kept_layers(self._decoder), layer_shapes(model), strict=True))

    def keeping(self, kept: Sequence[int]) -> "HFDecoder":
        slim = copy.copy(self)
        slim._decoder = keeping(self._decoder, kept)
        slim._shapes = {index: self._shapes[index] for index in kept}
        return slim

    @property
    def shapes(self) -> list[KVShape]:
        return list(self._shapes.values())

    @property
    def num_bytes(self) -> int:
        parameters = {*self._decoder.parameters(), *self._head.parameters()}  # tied ones are one and the same
        return sum(parameter.nbytes for parameter in parameters)

    def forward(self, step: PackedStep, store: KVStore) -> Tensor:
        self._context.step, self._context.store = step, store
        self._context.slots = {index: slot for slot, index in enumerate(self._shapes)}
        self._context.attended = []
        with _entering(self._decoder, store.feature_layers) as inputs:
            output = self._decoder(input_ids=step.ids[None], position_ids=step.positions[None], use_cache=False)
        if self._context.attended != list(self._shapes):
            raise ModelError(
                f"model type {self._text_config.model_type!r} has attention of its own, which knows no packed steps; "
                "supported are models whose layers each call transformers' AttentionInterface once"
            )
        if inputs:
            store.keep_features(step.rows, step.positions, torch.stack(inputs))
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return final_logits(self._head(hidden[None])[0].float(), self._text_config)


@contextmanager
def _entering(decoder: Network, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Collects the residual stream [T, H] that enters each of `layers` (ascending) in the pass that runs within.

    What enters the final norm is what left the last layer.
    """
    inputs: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        hidden = args[0]
        inputs.append(hidden[0])

    places = [*decoder.layers, decoder.norm] if layers else []
    hooks = [places[index].register_forward_pre_hook(keep) for index in layers]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def final_logits(logits: Tensor, config: Network) -> Tensor:
    """What a family makes of the head's output: `config` is the text config."""
    scaling = getattr(config, "logits_scaling", None)  # Granite divides
    if scaling:
        logits = logits / scaling
    multiplier = getattr(config, "logit_scale", None)  # Cohere multiplies
    if multiplier:
        logits = logits * multiplier
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma-2 squashes
    return torch.tanh(logits / cap) * cap if cap else logits


def check_layers(config: Network) -> None:
    """Refuse, by name, layers whose state cannot be rolled back by length (recurrent, linear attention, ...)."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or [])
    for kind in sorted(kinds - _EXACT_LAYERS):
        raise ModelError(
            f"model type {text.model_type!r} has layers of type {kind!r}, whose state cannot be rolled back by "
            "length after a rejected draft; models with full or sliding-window attention layers are supported"
        )


def check_build(model: Network) -> None:
    """Refuse, by its model type, a network without the modules that are run here; `model` may be on the meta device."""
    decoder = model.get_decoder()
    for owner, name in ((model, "lm_head"), (decoder, "layers")):
        if not hasattr(owner, name):
            kind = model.config.get_text_config().model_type
            raise ModelError(f"model type {kind!r}: {type(owner).__name__} has no `{name}`; {_SUPPORTED}")


def layer_shapes(model: Network) -> list[KVShape]:
    """The KV cache's shape, layer by layer of those it has; `model` may be on the meta device. Raises ModelError."""
    layers = kept_layers(model.get_decoder()).values()
    return [_shape(layer, model.config.get_text_config()) for layer in layers]


def _shape(layer: Network, config: Network) -> KVShape:
    """KV heads and head dimension of one layer, from its own projections (they differ by layer in some families)."""
    attention: Network = getattr(layer, "self_attn", None)
    head_dim: int | None = getattr(attention, "head_dim", None)
    if head_dim is None or not (hasattr(attention, "k_proj") or hasattr(attention, "qkv_proj")):
        raise ModelError(
            f"model type {config.model_type!r}: {type(layer).__name__} has no attention of a known form; {_SUPPORTED}"
        )
    if getattr(attention, "sinks", None) is not None:
        raise ModelError(f"model type {config.model_type!r} has attention sinks, which are not implemented here")
    if not hasattr(attention, "k_proj"):  # Phi-3: one fused projection
        return KVShape(config.num_key_value_heads, head_dim)
    return KVShape(attention.k_proj.weight.shape[0] // head_dim, head_dim)
