"""One step of many sequences in one row, without padding.

T packed tokens, N segments. Token t of a segment sits at position p of its sequence and slot p of its row of the KV
store; it attends to its own row's slots up to p. Nothing else separates sequences, and nothing else needs to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
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
class Ragged:
    """The N segments of a step as one flash kernel takes them, all int32.

    `starts` [N + 1] is where they begin among the T tokens, `used` [N] how many slots of its row the last token of each
    sees, `rows` [N, 1] those rows. No segment has more than `longest` tokens.
    """

    starts: Tensor
    used: Tensor
    rows: Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The flat arrays of one step, all int64[T]; `ragged` where attention over the store is one kernel."""

    ids: Tensor
    positions: Tensor
    rows: Tensor
    segments: Sequence[Segment]
    ragged: Ragged | None = None

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[0]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """A step on the host: `flat` has ids, positions and rows, int64[3, T]; `bounds` Ragged's arrays in a row, int32."""

    flat: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int32]

    @classmethod
    def of(
        cls, flat: npt.NDArray[np.int64], *, starts: Sequence[int], used: Sequence[int], rows: Sequence[int]
    ) -> "StepArrays":
        return cls(flat, np.array([*starts, *used, *rows], dtype=np.int32))

    @property
    def sizes(self) -> list[int]:
        """Lengths of the parts of `bounds`: N + 1, N and N."""
        count = len(self.bounds) // 3
        return [count + 1, count, count]

    def split(self) -> list[list[int]]:
        """starts, used and rows."""
        return [part.tolist() for part in np.split(self.bounds, np.cumsum(self.sizes)[:-1])]


def step_arrays(segments: Sequence[Segment]) -> StepArrays:
    """`segments`, concatenated."""
    starts = [0, *np.cumsum([s.stop - s.start for s in segments])]
    return StepArrays.of(
        _flat(segments), starts=starts, used=[s.stop for s in segments], rows=[s.row.index for s in segments]
    )


def pack(segments: Sequence[Segment], store: KVStore) -> PackedStep:
    """One step of `segments`, whose rows are those of `store`."""
    if not store.has_flash:
        flat = torch.from_numpy(_flat(segments)).to(store.device)
        return PackedStep(flat[0], flat[1], flat[2], segments)
    arrays = step_arrays(segments)
    flat = torch.from_numpy(arrays.flat).to(store.device)
    starts, used, rows = torch.from_numpy(arrays.bounds).to(store.device).split(arrays.sizes)
    longest = max(s.stop - s.start for s in segments)
    return PackedStep(flat[0], flat[1], flat[2], segments, Ragged(starts, used, rows[:, None], longest))


def _flat(segments: Sequence[Segment]) -> npt.NDArray[np.int64]:
    flat = np.empty((3, sum(s.stop - s.start for s in segments)), dtype=np.int64)
    at = 0
    for s in segments:
        part = flat[:, at : (at := at + s.stop - s.start)]
        part[0] = s.ids[s.start : s.stop]
        part[1] = np.arange(s.start, s.stop)
        part[2] = s.row.index
    return flat


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
