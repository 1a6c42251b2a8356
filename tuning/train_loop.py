"""What training loops share: batches of like lengths, the learning rate's course, checkpoints that resume."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from serving.errors import ConfigError


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
    """Linear warm-up, then a cosine down to nothing."""
    start = max(1, int(warm_up * num_steps))
    if step < start:
        return (step + 1) / start
    return 0.5 * (1 + math.cos(math.pi * (step - start) / max(1, num_steps - start)))


@dataclass(frozen=True)
class Checkpoint:
    """A file that a training goes on from. It is of the training that `made_with` describes, value by name, alone."""

    path: Path
    made_with: Mapping[str, str]

    @property
    def exists(self) -> bool:
        return self.path.is_file()

    def check(self) -> None:
        """Raise ConfigError if the file is of a training that differs in one of the names given here."""
        self._read()

    def of_text(self, key: str) -> "Checkpoint":
        """The same, of a training on the text that `key` tells from others. Raises ConfigError as `check` does."""
        checkpoint = replace(self, made_with={**self.made_with, "text": key})
        checkpoint.check()
        return checkpoint

    def save(self, module: nn.Module, optimiser: torch.optim.Optimizer, step: int) -> None:
        """Trained parameters, optimiser and number of steps done; all or nothing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        state = {"made_with": dict(self.made_with), "step": step, "trained": trained}
        torch.save(state | {"optimiser": optimiser.state_dict()}, partial)
        partial.replace(self.path)

    def restore(self, module: nn.Module, optimiser: torch.optim.Optimizer) -> int:
        """Load the file if it is there; returns how many steps were done. Raises ConfigError as `check` does."""
        state = self._read()
        if state is None:
            return 0
        module.load_state_dict(state["trained"], strict=False)  # what is frozen is in no checkpoint
        optimiser.load_state_dict(state["optimiser"])
        return int(state["step"])

    def _read(self) -> dict[str, Any] | None:
        if not self.exists:
            return None
        state: dict[str, Any] = torch.load(self.path, weights_only=True)
        found = state.get("made_with", {})
        other = [name for name, value in self.made_with.items() if found.get(name) != value]
        if other:
            raise ConfigError(
                f"--work: {self.path} is of a training with other {', '.join(other)}; choose another folder, or delete "
                "that file to train anew on the text that is there"
            )
        return state
