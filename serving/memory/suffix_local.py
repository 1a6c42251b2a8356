"""Local memory of the suffix cache: one request's prompt and output so far."""

import ctypes
from collections.abc import Iterator

import numpy as np

from serving.memory.occurrences import EXAMINED, SENTINEL, Level, deep_levels, most_recent
from serving.types import Ids, common_prefix


class _Fields(ctypes.Structure):
    """The struct Memory of suffix.cpp."""

    _fields_ = (("tokens", ctypes.c_void_p), ("length", ctypes.c_int64), ("capacity", ctypes.c_int64))


class LocalMemory:
    """A growing array of n tokens: SENTINEL, tokens, SENTINEL. No index, as a scan takes microseconds.

    Compiled code reads and appends by way of `address`, which stays the same.
    """

    def __init__(self, ids: Ids) -> None:
        self._fields = _Fields()
        self.address = ctypes.addressof(self._fields)
        self._hold(np.full(max(64, 2 * ids.size), SENTINEL, dtype=np.int32))
        self.append(ids)

    @property
    def length(self) -> int:
        """n"""
        return int(self._fields.length)

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    @property
    def tokens(self) -> Ids:
        """i32[n + 2], a view with both SENTINELs, valid until the next append or truncate."""
        return self._array[: self.length + 2]

    def ids_from(self, start: int) -> Ids:
        """i32[n - start], a view."""
        return self._array[1 + start : 1 + self.length]

    def context(self, size: int) -> Ids:
        """The last `size` tokens, newest first (fewer if there are fewer): a view."""
        return self._array[self.length : max(0, self.length - size) : -1]

    def append(self, ids: Ids) -> None:
        length = self.length + ids.size
        if length + 2 > self._array.size:
            grown = np.full(2 * (length + 2), SENTINEL, dtype=np.int32)
            grown[: self.length + 1] = self._array[: self.length + 1]
            self._hold(grown)
        self._array[self.length + 1 : length + 1] = ids
        self._array[length + 1] = SENTINEL
        self._fields.length = length

    def follow(self, ids: Ids) -> None:
        """Become the whole text `ids`; what both begin with is not written again."""
        common = common_prefix(self.ids_from(0), ids)
        if common < self.length:
            self.truncate(common)
        self.append(ids[common:])

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; `length` must not exceed the present one."""
        self._fields.length = length
        self._array[length + 1] = SENTINEL

    def levels(self, context: Ids, *, max_occurrences: int) -> Iterator[Level]:
        """Match lengths of `context`, which must not be empty, with their occurrences; longest first."""
        earlier = self._array[1 : self.length]  # without the last token: nothing follows it yet
        positions = most_recent(np.flatnonzero(earlier == context[0]) + 2, EXAMINED * max_occurrences)
        return deep_levels(self.tokens, positions, context=context, known=1, max_occurrences=max_occurrences)

    def check_integrity(self) -> None:
        """Raise AssertionError naming what is broken."""
        tokens = self.tokens
        if tokens[0] != SENTINEL or tokens[-1] != SENTINEL:
            raise AssertionError("local memory: sentinel missing at an end")
        if (tokens[1:-1] < 0).any():
            raise AssertionError("local memory: sentinel inside the sequence")

    def _hold(self, array: Ids) -> None:
        self._array = array
        self._fields.tokens, self._fields.capacity = array.ctypes.data, array.size
