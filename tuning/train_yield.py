"""Trains the yield predictor of HVD (arXiv 2606.01019): squared error on replayed yields, in torch; used in numpy."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from serving.drafters.yield_predictor import YieldPredictor
from serving.types import Floats

HIDDEN = 256


@dataclass(frozen=True)
class YieldRecipe:
    """Published: Adam, 20 epochs, seed 42. Batches are smaller than the published 65,536, as the data is."""

    epochs: int = 20
    learning_rate: float = 1e-3
    batch_size: int = 1024
    seed: int = 42


def train_yield(
    rows: Floats, yields: npt.NDArray[np.int32], recipe: YieldRecipe, *, on_epoch: Callable[[int, float], None]
) -> YieldPredictor:
    """From features f32[N, F] and accepted tokens i32[N]; `on_epoch` hears the epoch and its mean squared error."""
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        network = _network(rows.shape[1])
    mean, std = rows.mean(axis=0), np.maximum(rows.std(axis=0), 1e-3)
    inputs = torch.from_numpy((rows - mean) / std)
    targets = torch.from_numpy(yields.astype(np.float32))
    optimiser = torch.optim.Adam(network.parameters(), lr=recipe.learning_rate)
    for epoch in range(recipe.epochs):
        total = 0.0
        for batch in torch.randperm(len(inputs), generator=generator).split(recipe.batch_size):
            loss = (network(inputs[batch])[:, 0] - targets[batch]).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.item() * len(batch)
        on_epoch(epoch + 1, total / len(inputs))
    return _exported(network, mean, std)


def _network(num_features: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(num_features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
    )


def _exported(network: nn.Sequential, mean: Floats, std: Floats) -> YieldPredictor:
    layers = [layer for layer in network if isinstance(layer, nn.Linear)]
    (w1, b1), (w2, b2), (w3, b3) = ((_array(layer.weight.T), _array(layer.bias)) for layer in layers)
    return YieldPredictor(mean=mean, std=std, w1=w1, b1=b1, w2=w2, b2=b2, w3=w3, b3=b3)


def _array(tensor: Tensor) -> Floats:
    return np.ascontiguousarray(tensor.detach().numpy(), dtype=np.float32)
