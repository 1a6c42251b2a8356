"""One step of many sequences in one row, without padding.

T packed tokens, N segments. Token t of a segment sits at position p of its sequence and slot p of its row of the KV
store; it attends to its own row's slots up to p. Nothing else separates sequences, and nothing else needs to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from serving.models.kv_store import KVShape, KVStore, Row
from serving.types import Ids

# A stock Hugging Face network, its config or one of its modules: the library is untyped.
Network: TypeAlias = Any

# A request that lacks at most this many tokens besides those it asks about is not a prompt to be fed in chunks.
CATCH_UP = 32


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens ids[start:stop] of one sequence, to be computed in this step; the first `start` are cached in `row`."""

    row: Row
    ids: Ids
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The flat arrays of one step, all int64[T]."""

    ids: Tensor
    positions: Tensor
    rows: Tensor
    segments: Sequence[Segment]

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[0]


def pack(segments: Sequence[Segment], *, device: torch.device) -> PackedStep:
    """Concatenate `segments`."""
    ids = np.concatenate([s.ids[s.start : s.stop] for s in segments]).astype(np.int64)
    positions = np.concatenate([np.arange(s.start, s.stop, dtype=np.int64) for s in segments])
    lengths = [s.stop - s.start for s in segments]
    rows = np.repeat(np.array([s.row.index for s in segments], dtype=np.int64), lengths)
    flat = torch.from_numpy(np.stack([ids, positions, rows])).to(device)
    return PackedStep(flat[0], flat[1], flat[2], segments)


class Decoder(Protocol):
    """A causal LM's layers and head over packed steps. Its KV store has one entry a layer that it runs."""

    @property
    def shapes(self) -> list[KVShape]:
        """KV heads and head dimension, layer by layer."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        ...

    def forward(self, step: PackedStep, store: KVStore) -> Tensor:
        """Hidden states [T, H], as `logits` takes them; writes the step's keys and values into `store`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, V] logits of hidden [R, H], with the family's own scaling and soft cap."""
        ...


class LayeredDecoder(Decoder, Protocol):
    """A decoder that can leave layers out."""

    def keeping(self, kept: Sequence[int]) -> "LayeredDecoder":
        """Another decoder on the same weights that runs the layers `kept` only, by their original indices."""
        ...
