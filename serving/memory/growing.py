"""Counts of pairs that grow by a few at a time while others hold older snapshots of them."""

import hashlib
import heapq
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeVar, overload

from serving.memory.correction import PairCounts

T = TypeVar("T")
_NUM_SHARDS = 1021  # a prime, so that pairs spread over all shards; a change copies its shard
_EMPTY: Mapping[int, int] = {}
_ENTRY = struct.Struct("<qq")
_DIGESTS = 2**64


class ShardedCounts(Mapping[int, int]):
    """Counts by pair that never change. A successor with few changes shares all that it can with them.

    `digest` is that of `digest_of`, kept up to date by what changes.
    """

    def __init__(self, shards: tuple[Mapping[int, int], ...] = (_EMPTY,) * _NUM_SHARDS, digest: int = 0) -> None:
        self._shards = shards
        self._size = sum(map(len, shards))
        self.digest = digest

    def __getitem__(self, pair: int) -> int:
        return self._shards[pair % _NUM_SHARDS][pair]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._shards)

    def __len__(self) -> int:
        return self._size

    @overload
    def get(self, pair: int, /) -> int | None: ...
    @overload
    def get(self, pair: int, /, default: int | T) -> int | T: ...
    def get(self, pair: int, /, default: int | T | None = None) -> int | T | None:
        """Without the exception that a miss costs a Mapping: most look-ups miss."""
        return self._shards[pair % _NUM_SHARDS].get(pair, default)

    def changed(self, counts: Mapping[int, int], *, without: Iterable[int] = ()) -> "ShardedCounts":
        """These with `counts` in their place, and none of the pairs in `without`."""
        fresh: dict[int, dict[int, int]] = {}
        digest = self.digest

        def shard(pair: int) -> dict[int, int]:
            index = pair % _NUM_SHARDS
            if index not in fresh:
                fresh[index] = dict(self._shards[index])
            return fresh[index]

        for pair, count in counts.items():
            digest += _digest_of_entry(pair, count) - _digest_of_entry(pair, shard(pair).get(pair, 0))
            shard(pair)[pair] = count
        for pair in without:
            digest -= _digest_of_entry(pair, shard(pair).pop(pair, 0))
        shards = list(self._shards)
        for index, one in fresh.items():
            shards[index] = one
        return ShardedCounts(tuple(shards), digest % _DIGESTS)


def name_of(counts: Mapping[int, int]) -> str:
    """16 hex digits, the same for equal counts wherever and in whatever order they grew; empty without any."""
    digest = counts.digest if isinstance(counts, ShardedCounts) else digest_of(counts)
    return f"{digest:016x}" if counts else ""


def digest_of(counts: Mapping[int, int]) -> int:
    """The sum, modulo 2 ** 64, of a hash of each (pair, count): it has no order, so growing adds and subtracts."""
    return sum(_digest_of_entry(pair, count) for pair, count in counts.items()) % _DIGESTS


def _digest_of_entry(pair: int, count: int) -> int:
    """0 for a pair that was not seen."""
    return int.from_bytes(hashlib.blake2b(_ENTRY.pack(pair, count), digest_size=8).digest()) if count else 0


class GrowingCounts:
    """Counts of at most `max_pairs` pairs: beyond that those seen least are forgotten, of equals the larger number.

    Growing costs by the pairs that grow, not by those that are known.
    """

    def __init__(self, max_pairs: int) -> None:
        self._max_pairs = max_pairs
        self._seen = ShardedCounts()
        self._rescued = ShardedCounts()
        self._least: list[tuple[int, int]] = []  # a heap of (count, -pair); outdated entries are dropped when met

    @property
    def counts(self) -> PairCounts:
        """As of now; they never change."""
        return PairCounts(self._seen, self._rescued)

    def add(self, delta: PairCounts) -> None:
        """These counts plus `delta`."""
        self._put(
            {pair: self._seen.get(pair, 0) + count for pair, count in delta.seen.items()},
            {pair: self._rescued.get(pair, 0) + count for pair, count in delta.rescued.items()},
        )

    def raise_to(self, totals: PairCounts) -> None:
        """The larger of both counts of each pair."""
        seen = {pair: count for pair, count in totals.seen.items() if count > self._seen.get(pair, 0)}
        rescued = {pair: count for pair, count in totals.rescued.items() if count > self._rescued.get(pair, 0)}
        if seen:
            self._put(seen, rescued)

    def _put(self, seen: Mapping[int, int], rescued: Mapping[int, int]) -> None:
        self._seen = self._seen.changed(seen)
        for pair, count in seen.items():
            heapq.heappush(self._least, (count, -pair))
        gone = self._pop_least(len(self._seen) - self._max_pairs)
        self._seen = self._seen.changed({}, without=gone) if gone else self._seen
        self._rescued = self._rescued.changed(rescued, without=gone)
        if len(self._least) > 2 * len(self._seen) + _NUM_SHARDS:
            self._least = [(count, -pair) for pair, count in self._seen.items()]
            heapq.heapify(self._least)

    def _pop_least(self, num_pairs: int) -> list[int]:
        """The pairs seen least. A pair's count only grows, so each has one entry that is not outdated."""
        found: list[int] = []
        while len(found) < num_pairs:
            count, negated = heapq.heappop(self._least)
            if self._seen.get(-negated) == count:
                found.append(-negated)
        return found
