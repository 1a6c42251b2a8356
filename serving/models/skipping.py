"""Decoder layers that are left out: what stands in their place keeps every other layer's own index.

Families choose a layer's mask and rotary angles by its index, so layers are replaced, never moved up.
"""

import copy
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from serving.errors import ModelError
from serving.models.packed import Network


class SkippedLayer(nn.Module):
    """Passes the residual stream on; holds no weights."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def layers_of(decoder: Network) -> nn.ModuleList:
    """All layers of `decoder`. Raises ModelError for a family that has them elsewhere than in `layers`."""
    layers: nn.ModuleList | None = getattr(decoder, "layers", None)
    if layers is None:
        raise ModelError(
            f"model type {decoder.config.model_type!r}: {type(decoder).__name__} has no `layers`; "
            "supported are decoders whose `layers` carry `self_attn` with `k_proj` or `qkv_proj`"
        )
    return layers


def skip_layers(network: Network, kept: Collection[int]) -> Network:
    """`network` itself, without the weights of the layers that are not in `kept`."""
    layers = layers_of(network.get_decoder())
    for index in range(len(layers)):
        if index not in kept:
            layers[index] = SkippedLayer()
    return network


def keeping(decoder: Network, kept: Collection[int]) -> Network:
    """Another decoder over the same parameters that runs the layers in `kept`; `decoder` stays as it is."""
    slim = copy.copy(decoder)
    layers = (layer if index in kept else SkippedLayer() for index, layer in enumerate(layers_of(decoder)))
    slim._modules = {**decoder._modules, "layers": nn.ModuleList(layers)}
    return slim


def kept_layers(decoder: Network) -> dict[int, Network]:
    """The layers that are there, by their original index."""
    return {index: layer for index, layer in enumerate(layers_of(decoder)) if not isinstance(layer, SkippedLayer)}
