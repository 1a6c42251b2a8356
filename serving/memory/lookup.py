"""Who looks up a continuation: compiled code where there is a compiler, else numpy. Both find the same.

A look-up is to take less than a hundredth of a round, also among a million tokens: numpy's fixed cost a call is too
much for that (0.3 ms), compiled code takes microseconds.
"""

import ctypes
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from serving.compiling import load_library
from serving.memory.occurrences import EXAMINED, Candidate, PathLimits, best_candidate
from serving.memory.suffix_global import TenantMemory
from serving.memory.suffix_local import LocalMemory
from serving.types import Ids

_SOURCE = Path(__file__).with_name("kernels") / "suffix.cpp"

_ID_BYTES = 4


class _NativeLimits(ctypes.Structure):
    """The struct Limits of suffix.cpp."""

    _fields_ = (
        ("lengths", ctypes.c_void_p),
        ("max_depth", ctypes.c_int64),
        ("max_occurrences", ctypes.c_int64),
        ("examined", ctypes.c_int64),
        ("min_prob", ctypes.c_double),
    )


@dataclass(frozen=True)
class LookupLimits:
    """What bounds matches and paths."""

    path: PathLimits
    max_depth: int
    max_occurrences: int

    def tightened(self, max_draft: int) -> "LookupLimits":
        """With paths of at most `max_draft` tokens, if that is less."""
        if max_draft >= self.path.max_draft:
            return self
        return replace(self, path=replace(self.path, max_draft=max_draft))

    @cached_property
    def lengths(self) -> list[int]:
        """The longest path by match length, 0..max_depth."""
        return [self.path.length(m) for m in range(self.max_depth + 1)]

    @cached_property
    def _length_array(self) -> Ids:
        return np.array(self.lengths, dtype=np.int32)

    @cached_property
    def native(self) -> _NativeLimits:
        """The same for compiled code; valid as long as this object."""
        return _NativeLimits(
            self._length_array.ctypes.data,
            self.max_depth,
            self.max_occurrences,
            EXAMINED * self.max_occurrences,
            self.path.min_prob,
        )


class Lookup(Protocol):
    """Finds the best path after a request's tokens, in its own memory or its tenant's."""

    def local(self, request: LocalMemory, limits: LookupLimits) -> Candidate: ...

    def tenant(self, tenant: TenantMemory, request: LocalMemory, limits: LookupLimits, floor_score: float) -> Candidate:
        """Candidates below `floor_score` may be missed."""
        ...


class ArrayLookup:
    """By numpy: what defines the result, and what runs without a compiler."""

    def local(self, request: LocalMemory, limits: LookupLimits) -> Candidate:
        levels = request.levels(request.context(limits.max_depth), max_occurrences=limits.max_occurrences)
        return best_candidate(request.tokens, levels, limits=limits.path, floor_score=0.0)

    def tenant(self, tenant: TenantMemory, request: LocalMemory, limits: LookupLimits, floor_score: float) -> Candidate:
        levels = tenant.levels(request.context(limits.max_depth), max_occurrences=limits.max_occurrences)
        return best_candidate(tenant.tokens, levels, limits=limits.path, floor_score=floor_score)


class NativeLookup:
    """By suffix.cpp, on the same arrays."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        limits = ctypes.POINTER(_NativeLimits)
        self._local = library.dh_suffix_local
        self._local.argtypes = [pointer, size, limits, *[pointer] * 4]
        self._tenant = library.dh_suffix_global
        self._tenant.argtypes = [pointer, pointer, size, size, pointer, size, limits, real, *[pointer] * 4]
        self._ids = np.zeros(256, dtype=np.int32)
        self._probabilities = np.zeros(256, dtype=np.float64)
        self._match_length, self._score = ctypes.c_int32(), ctypes.c_double()
        self._out = (
            self._ids.ctypes.data,
            self._probabilities.ctypes.data,
            ctypes.addressof(self._match_length),
            ctypes.addressof(self._score),
        )

    def local(self, request: LocalMemory, limits: LookupLimits) -> Candidate:
        return self._candidate(self._local(request.address, request.length, limits.native, *self._out))

    def tenant(self, tenant: TenantMemory, request: LocalMemory, limits: LookupLimits, floor_score: float) -> Candidate:
        last = request.address + request.length * _ID_BYTES
        table = tenant.table
        count = self._tenant(
            table.tokens, table.address, tenant.num_segments, table.front, last, request.length, limits.native,
            floor_score, *self._out,
        )  # fmt: skip
        return self._candidate(count)

    def _candidate(self, count: int) -> Candidate:
        return Candidate(
            self._match_length.value,
            self._ids[:count].tolist(),
            self._probabilities[:count].tolist(),
            self._score.value,
        )


def best_lookup() -> Lookup:
    """Compiled code if there is a compiler. For one cache: what it finds passes through buffers of its own."""
    library = load_library(_SOURCE, otherwise="looking up drafts takes some tenths of a millisecond")
    return ArrayLookup() if library is None else NativeLookup(library)
