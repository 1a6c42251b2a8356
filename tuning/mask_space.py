"""What a mask search asks: which layers to skip, judged on which block of rows."""

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

Mask: TypeAlias = tuple[int, ...]

NUM_BLOCKS = 3  # of rows, equally many in each, all from other prompts


class Question(NamedTuple):
    """What does it cost to skip the layers `mask` (ascending), on this block of rows? Every question costs the same."""

    mask: Mask
    block: int = 0


Asking: TypeAlias = Generator[Question, float, None]


@dataclass(frozen=True)
class Space:
    """Masks that skip `num_skipped` of the layers between the first and the last of `num_layers`."""

    num_layers: int
    num_skipped: int

    @property
    def candidates(self) -> range:
        return range(1, self.num_layers - 1)

    def top(self, keys: Iterable[float]) -> Mask:
        """The layers with the highest keys, one a candidate; the lower layer where keys are equal."""
        order = sorted(zip(self.candidates, keys, strict=True), key=lambda pair: (-pair[1], pair[0]))
        return tuple(sorted(layer for layer, _ in order[: self.num_skipped]))

    def drawn(self, rng: np.random.Generator) -> Mask:
        """Any mask, each as likely."""
        picked = rng.choice(list(self.candidates), self.num_skipped, replace=False)
        return tuple(sorted(int(layer) for layer in picked))
