"""What training loops share: batches of like lengths, the learning rate's course, checkpoints that resume."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn


def length_batches(lengths: Sequence[int], *, tokens_per_batch: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """Indices, batch by batch, epoch by epoch: like lengths together, so that padding is small; order by seed.

    A batch has at most `tokens_per_batch` positions, padding included, unless one entry alone has more.
    """
    for epoch in range(epochs):
        rng = np.random.default_rng((seed, epoch))
        order = sorted(range(len(lengths)), key=lambda i: lengths[i] + rng.uniform(0, 16))
        batches: list[list[int]] = []
        current: list[int] = []
        for index in order:
            longest = max([lengths[index], *(lengths[i] for i in current)])
            if current and longest * (len(current) + 1) > tokens_per_batch:
                batches.append(current)
                current = []
            current.append(index)
        batches.append(current)
        for at in rng.permutation(len(batches)):
            yield batches[at]


def learning_rate_share(step: int, num_steps: int, warm_up: float) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    start = max(1, int(warm_up * num_steps))
    if step < start:
        return (step + 1) / start
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - start) / max(1, num_steps - start)))


def save_checkpoint(module: nn.Module, optimiser: torch.optim.Optimizer, path: Path, step: int) -> None:
    """Trained parameters, optimiser and number of steps done; all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    torch.save({"step": step, "trained": trained, "optimiser": optimiser.state_dict()}, partial)
    partial.replace(path)


def restore_checkpoint(module: nn.Module, optimiser: torch.optim.Optimizer, path: Path) -> int:
    """Load `path` if it is there; returns how many steps were done."""
    if not path.is_file():
        return 0
    state = torch.load(path, weights_only=True)
    module.load_state_dict(state["trained"], strict=False)
    optimiser.load_state_dict(state["optimiser"])
    return int(state["step"])
