"""Who looks up a continuation: compiled code where there is a compiler, else numpy. Both find the same.

A look-up is to take less than a hundredth of a round, also among a million tokens: numpy's fixed cost a call is too
much for that (0.3 ms), compiled code takes microseconds.
"""

import ctypes
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from struct import Struct
from typing import Protocol

import numpy as np

from serving.compiling import load_library
from serving.memory.occurrences import EXAMINED, NO_CANDIDATE, Candidate, PathLimits, best_candidate
from serving.memory.suffix_global import TenantMemory
from serving.memory.suffix_local import LocalMemory
from serving.types import Floats, Ids, as_ids

_SOURCE = Path(__file__).with_name("kernels") / "suffix.cpp"

MOST_DRAFTED = 256


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
    def address(self) -> int:
        """Where compiled code finds the same; valid as long as this object."""
        return ctypes.addressof(self._native)

    @cached_property
    def _native(self) -> _NativeLimits:
        return _NativeLimits(
            self._length_array.ctypes.data,
            self.max_depth,
            self.max_occurrences,
            EXAMINED * self.max_occurrences,
            self.path.min_prob,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SuffixMatch:
    """A proposed continuation of K tokens; all empty and zero when there is none.

    probabilities are of the whole path up to each token, f32[K]; score is their sum, at most K.
    """

    ids: Ids
    score: float
    match_length: int
    probabilities: Floats
    is_local: bool

    def __len__(self) -> int:
        return self.ids.size

    @property
    def empty(self) -> bool:
        return self.ids.size == 0

    @classmethod
    def of(cls, candidate: Candidate, *, is_local: bool) -> "SuffixMatch":
        ids, probabilities = as_ids(candidate.ids), np.array(candidate.probabilities, dtype=np.float32)
        return cls(ids, candidate.score, candidate.match_length, probabilities, is_local)


NO_MATCH = SuffixMatch.of(NO_CANDIDATE, is_local=False)
for _array in (NO_MATCH.ids, NO_MATCH.probabilities):
    _array.flags.writeable = False


class Lookup(Protocol):
    """Finds the best path after a request's tokens, in its own memory and its tenant's."""

    def best(self, request: LocalMemory, tenant: TenantMemory | None, limits: LookupLimits) -> SuffixMatch:
        """`request` has tokens."""
        ...


class ArrayLookup:
    """By numpy: what defines the result, and what runs without a compiler."""

    def best(self, request: LocalMemory, tenant: TenantMemory | None, limits: LookupLimits) -> SuffixMatch:
        context, count = request.context(limits.max_depth), limits.max_occurrences
        levels = request.levels(context, max_occurrences=count)
        local = best_candidate(request.tokens, levels, limits=limits.path, floor_score=0.0)
        # In text that repeats itself a perfect local match of the whole context is common: nothing beats it.
        longest = limits.lengths[context.size], context.size
        if tenant is not None and longest > (local.score, local.match_length):
            levels = tenant.levels(context, max_occurrences=count)
            found = best_candidate(tenant.tokens, levels, limits=limits.path, floor_score=local.score)
            if (found.score, found.match_length) > (local.score, local.match_length):
                return SuffixMatch.of(found, is_local=False)
        return SuffixMatch.of(local, is_local=bool(local.ids))


class _NativeMatch(ctypes.Structure):
    """The struct Match of suffix.cpp."""

    _fields_ = (
        ("score", ctypes.c_double),
        ("match_length", ctypes.c_int32),
        ("is_local", ctypes.c_int32),
        ("ids", ctypes.c_int32 * MOST_DRAFTED),
        ("probabilities", ctypes.c_float * MOST_DRAFTED),
    )


_MATCH_HEAD = Struct("=dii")  # of _NativeMatch, in one call


class NativeLookup:
    """By suffix.cpp, on the same arrays."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer = ctypes.c_void_p
        self._run = library.dh_suffix
        self._run.argtypes = [pointer, ctypes.c_int64, pointer, pointer, pointer]
        self._found = _NativeMatch()
        self._address = ctypes.addressof(self._found)
        self._ids = np.frombuffer(self._found.ids, dtype=np.int32)
        self._probabilities = np.frombuffer(self._found.probabilities, dtype=np.float32)

    def best(self, request: LocalMemory, tenant: TenantMemory | None, limits: LookupLimits) -> SuffixMatch:
        responses = None if tenant is None else tenant.table.address
        count = self._run(request.address, request.length, responses, limits.address, self._address)
        if not count:
            return NO_MATCH
        score, match_length, is_local = _MATCH_HEAD.unpack_from(self._found)
        ids, probabilities = self._ids[:count].copy(), self._probabilities[:count].copy()
        return SuffixMatch(ids, score, match_length, probabilities, bool(is_local))


def best_lookup() -> Lookup:
    """Compiled code if there is a compiler. For one cache: what it finds passes through buffers of its own."""
    library = load_library(_SOURCE, otherwise="looking up drafts takes some tenths of a millisecond")
    return ArrayLookup() if library is None else NativeLookup(library)
