"""Who looks up a continuation: compiled code where there is a compiler, else numpy. Both find the same.

A look-up is to take less than a hundredth of a round, also among a million tokens: numpy's fixed cost a call is too
much for that (0.3 ms), compiled code takes microseconds.
"""

import ctypes
from dataclasses import dataclass, replace
from functools import cached_property
from math import nan
from pathlib import Path
from struct import Struct
from typing import Protocol

import numpy as np
import numpy.typing as npt

from serving.compiling import load_library
from serving.memory.occurrences import EXAMINED, NO_CANDIDATE, Candidate, PathLimits, best_candidate
from serving.memory.suffix_global import TenantMemory, checked_ids
from serving.memory.suffix_local import LocalMemory
from serving.types import Floats, Ids

_SOURCE = Path(__file__).with_name("kernels") / "suffix.cpp"

MOST_DRAFTED = 256
MOST_OF_PLACE = 64  # bytes


class _NativeLimits(ctypes.Structure):
    """The struct Limits of suffix.cpp."""

    _fields_ = (
        ("lengths", ctypes.c_void_p),
        ("max_depth", ctypes.c_int64),
        ("max_occurrences", ctypes.c_int64),
        ("examined", ctypes.c_int64),
        ("min_prob", ctypes.c_double),
    )


class JudgeFields(ctypes.Structure):
    """The struct Judge of suffix.cpp: compiled code that says of each match what it is worth, where the match is found.

    It is told the match and the bytes of its place, at most MOST_OF_PLACE. `owner` keeps what the pointers point to.
    """

    owner: object = None

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("run", "network", "kinds", "room", "first")),
        ("num_first", ctypes.c_int64),
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

    It stays as compiled code wrote it (the struct Match of suffix.cpp) and compiled code reads it, until it is drafted.
    """

    packed: bytes

    def __len__(self) -> int:
        return (len(self.packed) - _HEAD.size) // _BYTES_A_TOKEN

    @property
    def empty(self) -> bool:
        return len(self.packed) == _HEAD.size

    @property
    def score(self) -> float:
        """The sum of `probabilities`, at most K."""
        return float(_HEAD.unpack_from(self.packed)[0])

    @property
    def match_length(self) -> int:
        return int(_HEAD.unpack_from(self.packed)[1])

    @property
    def is_local(self) -> bool:
        """Whether it goes on as the request itself did, and not as an earlier response."""
        return bool(_HEAD.unpack_from(self.packed)[2])

    @property
    def predicted(self) -> float:
        """Tokens of it that a judge expects to be accepted; NaN where none was asked."""
        return float(_HEAD.unpack_from(self.packed)[4])

    @property
    def ids(self) -> Ids:
        """i32[K], read-only."""
        return np.frombuffer(self.packed, np.int32, len(self), _HEAD.size)

    @property
    def probabilities(self) -> Floats:
        """f32[K], of the whole path up to each token; read-only."""
        return np.frombuffer(self.packed, np.float32, len(self), _HEAD.size + 4 * len(self))

    @classmethod
    def of(
        cls, ids: npt.ArrayLike, score: float, match_length: int, probabilities: npt.ArrayLike, *, is_local: bool
    ) -> "SuffixMatch":
        tokens, shares = np.asarray(ids, dtype=np.int32), np.asarray(probabilities, dtype=np.float32)
        head = _HEAD.pack(score, match_length, is_local, len(tokens), nan)
        return cls(head + tokens.tobytes() + shares.tobytes())

    @classmethod
    def of_candidate(cls, found: Candidate, *, is_local: bool) -> "SuffixMatch":
        return cls.of(found.ids, found.score, found.match_length, found.probabilities, is_local=is_local)


_HEAD = Struct("=d3if")  # score, match_length, is_local, K, predicted; ids and probabilities follow
_BYTES_A_TOKEN = 8
NO_MATCH = SuffixMatch.of_candidate(NO_CANDIDATE, is_local=False)


class Lookup(Protocol):
    """Finds the best path after a request's tokens, in its own memory and its tenant's."""

    def best(
        self, request: LocalMemory, tenant: TenantMemory | None, limits: LookupLimits, tokens: Ids | None = None,
        place: bytes = b"",
    ) -> SuffixMatch:  # fmt: skip
        """`tokens`, if any are given, are what `request` has to hold first. Raises ValueError for one that is no id.

        `place` is for the judge of the match, if there is one.
        """
        ...


class ArrayLookup:
    """By numpy: what defines the result, and what runs without a compiler."""

    def best(
        self, request: LocalMemory, tenant: TenantMemory | None, limits: LookupLimits, tokens: Ids | None = None,
        place: bytes = b"",
    ) -> SuffixMatch:  # fmt: skip
        if tokens is not None:
            request.follow(checked_ids(tokens))
        context, count = request.context(limits.max_depth), limits.max_occurrences
        if not context.size or not limits.lengths[context.size]:
            return NO_MATCH
        levels = request.levels(context, max_occurrences=count)
        local = best_candidate(request.tokens, levels, limits=limits.path, floor_score=0.0)
        # In text that repeats itself a perfect local match of the whole context is common: nothing beats it.
        longest = limits.lengths[context.size], context.size
        if tenant is not None and longest > (local.score, local.match_length):
            levels = tenant.levels(context, max_occurrences=count)
            found = best_candidate(tenant.tokens, levels, limits=limits.path, floor_score=local.score)
            if (found.score, found.match_length) > (local.score, local.match_length):
                return SuffixMatch.of_candidate(found, is_local=False)
        return SuffixMatch.of_candidate(local, is_local=bool(local.ids))


class NativeLookup:
    """By suffix.cpp, on the same arrays. `judge` is asked about every match."""

    def __init__(self, library: ctypes.CDLL, judge: JudgeFields | None = None) -> None:
        pointer, size, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
        self._run = library.dh_suffix
        self._run.argtypes = [pointer, text, size, pointer, pointer, pointer, text, size, pointer]
        self._judge = judge  # owned as long as its address is used
        self._judge_address = None if judge is None else ctypes.addressof(judge)
        found = (ctypes.c_char * (_HEAD.size + _BYTES_A_TOKEN * MOST_DRAFTED + MOST_OF_PLACE))()
        self._found, self._address = memoryview(found), ctypes.addressof(found)

    def best(
        self, request: LocalMemory, tenant: TenantMemory | None, limits: LookupLimits, tokens: Ids | None = None,
        place: bytes = b"",
    ) -> SuffixMatch:  # fmt: skip
        others = (
            None if tenant is None else tenant.table.address, limits.address, self._judge_address, place, len(place),
            self._address,
        )  # fmt: skip
        text, length = (None, 0) if tokens is None else (tokens.tobytes(), tokens.size)
        size = self._run(request.address, text, length, *others)
        if tokens is not None and size < 0:  # it has no room for them, or some are no ids
            request.follow(checked_ids(tokens))
            size = self._run(request.address, None, 0, *others)
        return SuffixMatch(self._found[:size].tobytes())


def best_lookup(judge: JudgeFields | None = None) -> Lookup:
    """Compiled code, and its judge, if there is a compiler.

    For one cache: what it finds passes through buffers of its own.
    """
    library = load_library(_SOURCE, otherwise="looking up drafts takes some tenths of a millisecond")
    return ArrayLookup() if library is None else NativeLookup(library, judge)
