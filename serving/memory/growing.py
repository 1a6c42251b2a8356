"""Counts of pairs that grow by a few at a time while others hold older snapshots of them."""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeVar, overload

from serving.memory.correction import PairCounts

T = TypeVar("T")
_NUM_SHARDS = 1021  # a prime, so that pairs spread over all shards; a change copies its shard
_EMPTY: Mapping[int, int] = {}


class ShardedCounts(Mapping[int, int]):
    """Counts by pair that never change. A successor with few changes shares all that it can with them."""

    def __init__(self, shards: tuple[Mapping[int, int], ...] = (_EMPTY,) * _NUM_SHARDS) -> None:
        self._shards = shards
        self._size = sum(map(len, shards))

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

        def shard(pair: int) -> dict[int, int]:
            index = pair % _NUM_SHARDS
            if index not in fresh:
                fresh[index] = dict(self._shards[index])
            return fresh[index]

        for pair, count in counts.items():
            shard(pair)[pair] = count
        for pair in without:
            shard(pair).pop(pair, None)
        shards = list(self._shards)
        for index, one in fresh.items():
            shards[index] = one
        return ShardedCounts(tuple(shards))


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

    def raise_to(self, totals: PairCounts) -> bool:
        """The larger of both counts of each pair; says whether any was seen more often than known."""
        seen = {pair: count for pair, count in totals.seen.items() if count > self._seen.get(pair, 0)}
        rescued = {pair: count for pair, count in totals.rescued.items() if count > self._rescued.get(pair, 0)}
        if seen:
            self._put(seen, rescued)
        return bool(seen)

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
