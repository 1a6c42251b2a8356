"""Decoder layers that are left out: what stands in their place keeps every other layer's own index.

Families choose a layer's mask and rotary angles by its index, so layers are replaced, never moved up.
"""

import copy
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from serving.models.packed import Network


class SkippedLayer(nn.Module):
    """Passes the residual stream on; holds no weights."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def skip_layers(network: Network, kept: Collection[int]) -> Network:
    """`network` itself, without the weights of the layers that are not in `kept`."""
    layers = network.get_decoder().layers
    for index in range(len(layers)):
        if index not in kept:
            layers[index] = SkippedLayer()
    return network


def keeping(decoder: Network, kept: Collection[int]) -> Network:
    """Another decoder over the same parameters that runs the layers in `kept`; `decoder` stays as it is."""
    slim = copy.copy(decoder)
    layers = (layer if index in kept else SkippedLayer() for index, layer in enumerate(decoder.layers))
    slim._modules = {**decoder._modules, "layers": nn.ModuleList(layers)}
    return slim


def kept_layers(decoder: Network) -> dict[int, Network]:
    """The layers that are there, by their original index."""
    return {index: layer for index, layer in enumerate(decoder.layers) if not isinstance(layer, SkippedLayer)}
