"""Global memory of the suffix cache: the finished responses of one tenant.

    tokens   SENTINEL r1 SENTINEL r2 SENTINEL ... in one array; the oldest response leaves at the front
    segment  a run of whole responses, with its positions sorted by the three tokens before them

The occurrences of the last 1, 2 or 3 tokens are one interval of a segment's sorted keys; longer matches
filter the interval for 3. Segments are merged like a log-structured tree: few to search, cheap to add to.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from serving.memory.occurrences import (
    EXAMINED,
    SENTINEL,
    Level,
    Positions,
    deep_levels,
    most_recent,
)
from serving.types import Ids

Keys: TypeAlias = npt.NDArray[np.int64]

KEY_TOKENS = 3
KEY_BITS = 21
# Token ids are below it. A key packs id + 1, 0 stands for "before the start", and id + 2 must fit as a bound.
ID_LIMIT = (1 << KEY_BITS) - 2
_FEW = 64  # tokens that are checked faster by Python than by numpy
SEGMENT_TOKENS = 131_072  # merging stops here, which bounds the pause of one insert to milliseconds
_SIMILAR = 4  # a segment is merged with a younger neighbour of at least a quarter of its size


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTable:
    """Where compiled code finds a memory: valid until the next insert or evict.

    rows     i64[S, 4]  addresses of keys and offsets, number of keys, start
    head     i64[4]     addresses of tokens[0] and of rows, S, front; address: of it
    """

    rows: npt.NDArray[np.int64]
    head: npt.NDArray[np.int64]
    address: int


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Positions of whole responses, sorted by key.

    start    index in tokens of the SENTINEL before its first response
    size     tokens and SENTINELs: start + size is the SENTINEL after its last response, and the next start
    keys     i64[N] ascending; the 3 tokens before a position, most recent in the high bits
    offsets  i32[N] position - start
    """

    start: int
    size: int
    keys: Keys
    offsets: Ids

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.offsets.nbytes

    def positions(self, low: int, high: int) -> Positions:
        return np.add(self.offsets[low:high], self.start, dtype=np.intp)

    def moved(self, distance: int) -> "Segment":
        return Segment(self.start + distance, self.size, self.keys, self.offsets)

    def without_front(self, start: int) -> "Segment":
        """Forget the positions of responses before `start`."""
        gone = start - self.start
        kept = self.offsets > gone
        return Segment(start, self.size - gone, self.keys[kept], self.offsets[kept] - np.int32(gone))


def pack_keys(ids: Ids) -> Keys:
    """Keys i64[n - 1] of the positions 1..n-1 of one response i32[n], n >= 2."""
    padded = np.zeros(ids.size + 2, dtype=np.int64)
    np.add(ids, 1, out=padded[2:])
    return padded[2:-1] << 2 * KEY_BITS | padded[1:-2] << KEY_BITS | padded[:-3]


def key_bounds(context: Ids) -> Keys:
    """i64[M, 2], M = min(3, C) >= 1: row m-1 is the half-open interval of the keys of an m-token match."""
    bounds = np.empty((min(KEY_TOKENS, context.size), 2), dtype=np.int64)
    key = 0
    for index, token in enumerate(context[:KEY_TOKENS].tolist()):
        shift = KEY_BITS * (KEY_TOKENS - 1 - index)
        key |= (token + 1) << shift
        bounds[index] = key, key + (1 << shift)
    return bounds


def _index(ids: Ids, start: int) -> Segment:
    keys = pack_keys(ids)
    order = np.argsort(keys, kind="stable")
    return Segment(start, ids.size + 1, keys[order], (order + 2).astype(np.int32))


def _merge(old: Segment, new: Segment) -> Segment:
    keys = np.concatenate((old.keys, new.keys))
    offsets = np.concatenate((old.offsets, new.offsets + np.int32(old.size)))
    order = np.argsort(keys, kind="stable")  # timsort: two sorted runs merge in linear time
    return Segment(old.start, old.size + new.size, keys[order], offsets[order])


class TenantMemory:
    """The responses of one tenant in order of insertion; not bounded, its owner evicts."""

    def __init__(self, *, segment_tokens: int = SEGMENT_TOKENS) -> None:
        self._segment_tokens = segment_tokens
        self._array = np.full(64, SENTINEL, dtype=np.int32)
        self._front = 0  # the SENTINEL before the oldest response
        self._stop = 1  # one past the SENTINEL after the newest response
        self._lengths: deque[int] = deque()
        self._segments: list[Segment] = []
        self._table: SegmentTable | None = None

    @property
    def num_responses(self) -> int:
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        return self._stop - self._front - 1 - self.num_responses

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    @property
    def nbytes(self) -> int:
        return self._array.nbytes + sum(segment.nbytes for segment in self._segments)

    @property
    def tokens(self) -> Ids:
        """A view that starts and ends with SENTINEL, valid until the next insert or evict."""
        return self._array[: self._stop]

    @property
    def table(self) -> SegmentTable:
        if self._table is None:
            rows = [(s.keys.ctypes.data, s.offsets.ctypes.data, s.keys.size, s.start) for s in self._segments]
            array = np.array(rows, dtype=np.int64).reshape(-1, 4)
            head = np.array([self._array.ctypes.data, array.ctypes.data, len(rows), self._front], dtype=np.int64)
            self._table = SegmentTable(array, head, head.ctypes.data)
        return self._table

    def insert(self, ids: Ids) -> None:
        """Add a response i32[n], n >= 2 (a single token has no follower)."""
        self._table = None
        if self._stop + ids.size + 1 > self._array.size:
            self._reallocate(ids.size + 1)
        segment = _index(ids, self._stop - 1)
        self._array[self._stop : self._stop + ids.size] = ids
        self._stop += ids.size + 1
        self._array[self._stop - 1] = SENTINEL
        self._lengths.append(ids.size)
        self._segments.append(segment)
        while self._mergeable():
            new = self._segments.pop()
            self._segments.append(_merge(self._segments.pop(), new))

    def evict_oldest(self) -> int:
        """Forget the oldest response; returns its number of tokens."""
        self._table = None
        length = self._lengths.popleft()
        self._front += length + 1
        if self._segments[0].stop <= self._front:
            del self._segments[0]
        elif 2 * (self._front - self._segments[0].start) > self._segments[0].size:
            self._segments[0] = self._segments[0].without_front(self._front)
        if self._array.size > 4 * (self._stop - self._origin) + 64:
            self._reallocate(0)
        return length

    def levels(self, context: Ids, *, max_occurrences: int) -> Iterator[Level]:
        """Match lengths of `context`, which must not be empty, with their occurrences; longest first.

        More than max_occurrences: only the most recent count. Beyond 3 tokens, only the most recent
        EXAMINED * max_occurrences places where the last 3 tokens occur are examined.
        """
        bounds = key_bounds(context)
        known = len(bounds)
        found = np.empty((self.num_segments, known, 2), dtype=np.int64)
        for index, segment in enumerate(self._segments):
            found[index] = segment.keys.searchsorted(bounds)
        sizes = (found[:, :, 1] - found[:, :, 0]).sum(axis=0)
        positions = self._collect(found, known, EXAMINED * max_occurrences)
        yield from deep_levels(self.tokens, positions, context=context, known=known, max_occurrences=max_occurrences)
        for match_length in range(known - 1, 0, -1):
            if sizes[match_length - 1] > sizes[match_length]:
                yield Level(match_length, partial(self._collect, found, match_length, max_occurrences))

    def check_integrity(self) -> None:
        """Raise AssertionError naming what is broken."""
        self._check_tokens()
        starts = [segment.start for segment in self._segments]
        stops = [segment.stop for segment in self._segments]
        if [*starts[1:], self._stop - 1] != stops or not starts[0] <= self._front < stops[0]:
            raise AssertionError(f"segments {starts} to {stops} do not tile the tokens")
        for segment in self._segments:
            self._check_segment(segment)

    @property
    def _origin(self) -> int:
        """The first index that a segment refers to."""
        return self._segments[0].start if self._segments else self._front

    def _mergeable(self) -> bool:
        if len(self._segments) < 2:
            return False
        old, new = self._segments[-2:]
        return old.size <= _SIMILAR * new.size and old.size + new.size <= self._segment_tokens

    def _reallocate(self, room: int) -> None:
        """Move the tokens to an array twice as large as they and `room` need, without evicted ones."""
        origin = self._origin
        used = self._stop - origin
        array = np.full(max(64, 2 * (used + room)), SENTINEL, dtype=np.int32)
        array[:used] = self._array[origin : self._stop]
        self._array = array
        self._front -= origin
        self._stop = used
        self._segments = [segment.moved(-origin) for segment in self._segments]

    def _collect(self, found: Keys, match_length: int, count: int) -> Positions:
        """The `count` most recent occurrences; found i64[S, M, 2] are intervals of the keys of S segments."""
        parts = [np.empty(0, dtype=np.intp)]
        missing = count
        intervals = found[::-1, match_length - 1].tolist()
        for segment, (low, high) in zip(reversed(self._segments), intervals, strict=True):
            if low == high:
                continue
            positions = segment.positions(low, high)
            if segment.start < self._front:
                positions = positions[positions > self._front]
            parts.append(most_recent(positions, missing))
            missing -= parts[-1].size
            if not missing:
                break
        return np.concatenate(parts)

    def _check_tokens(self) -> None:
        live = self._array[self._front : self._stop]
        ends = np.cumsum([0, *(length + 1 for length in self._lengths)])
        if not np.array_equal(np.flatnonzero(live == SENTINEL), ends):
            raise AssertionError("sentinels are not exactly around the responses")
        if live.min() < SENTINEL or live.max() >= ID_LIMIT:
            raise AssertionError("a token id is out of range")
        if self._array[0] != SENTINEL:
            raise AssertionError("no sentinel at the start of the tokens")

    def _check_segment(self, segment: Segment) -> None:
        if segment.keys.size != segment.offsets.size:
            raise AssertionError(f"segment at {segment.start}: as many keys as offsets expected")
        if (np.diff(segment.keys) < 0).any():
            raise AssertionError(f"segment at {segment.start}: keys are not sorted")
        positions = segment.positions(0, segment.offsets.size)
        live = positions > self._front
        ids = self._array[max(segment.start, self._front) : segment.stop + 1]
        edges = np.flatnonzero(ids == SENTINEL)
        responses = [ids[start + 1 : stop] for start, stop in pairwise(edges.tolist())]
        expected = np.concatenate([pack_keys(response) for response in responses])
        order = np.argsort(positions[live])
        if not np.array_equal(segment.keys[live][order], expected):
            raise AssertionError(f"segment at {segment.start}: keys and tokens disagree")


def checked_ids(tokens: npt.ArrayLike) -> Ids:
    """i32[n] of valid token ids, else ValueError."""
    values = np.asarray(tokens)
    if values.ndim == 1 and values.size <= _FEW and values.dtype == np.int32:
        few = values.tolist()
        if not few or (min(few) >= 0 and max(few) < ID_LIMIT):
            return values
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise ValueError(f"tokens must be a row of integers, got shape {values.shape} of {values.dtype}")
    if values.size and not (values.min() >= 0 and values.max() < ID_LIMIT):
        raise ValueError(f"tokens must be in [0, {ID_LIMIT}), got {values.min()} to {values.max()}")
    return values.astype(np.int32, copy=False)
