"""CSD's correction memory (arXiv 2604.13634): how often the target put one token in another's place.

A pair (draft id, target id) is one integer, draft << 32 | target. `seen` counts every divergence that was met and
emitted, `rescued` those whose drafted token was kept; only `seen` nominates.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from serving.types import Verdict

PAIR_BITS = 32


def pair_of(draft_id: int, target_id: int) -> int:
    return draft_id << PAIR_BITS | target_id


def ids_of_pair(pair: int) -> tuple[int, int]:
    """(draft id, target id)."""
    return pair >> PAIR_BITS, pair & ((1 << PAIR_BITS) - 1)


@dataclass(frozen=True)
class PairCounts:
    """Counts by pair that never change: what a request sees of a memory all its life. Not to be mutated."""

    seen: Mapping[int, int] = field(default_factory=dict)
    rescued: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, seen: Mapping[tuple[int, int], int]) -> "PairCounts":
        """From counts by (draft id, target id)."""
        return cls({pair_of(*ids): count for ids, count in seen.items()})

    def __len__(self) -> int:
        return len(self.seen)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the `seen` counts, the same for the same counts; empty without any."""
        if not self.seen:
            return ""
        table = np.array(sorted(self.seen.items()), dtype="<i8")
        return hashlib.sha256(table.tobytes()).hexdigest()[:16]

    def only(self, pairs: Iterable[int]) -> "PairCounts":
        """The counts of `pairs`, which must be among them."""
        some = list(pairs)
        return PairCounts(
            {pair: self.seen[pair] for pair in some},
            {pair: self.rescued[pair] for pair in some if pair in self.rescued},
        )

    def merged(self, delta: "PairCounts", *, max_pairs: int) -> "PairCounts":
        """These counts plus `delta`, grown only; beyond `max_pairs` the pairs seen least are forgotten."""
        seen = Counter(self.seen)
        seen.update(delta.seen)
        if len(seen) > max_pairs:
            seen = Counter(dict(sorted(seen.items(), key=lambda item: (-item[1], item[0]))[:max_pairs]))
        rescued = Counter(self.rescued)
        rescued.update(delta.rescued)
        return PairCounts(dict(seen), {pair: count for pair, count in rescued.items() if pair in seen})


EMPTY_COUNTS = PairCounts()


class RequestMemory:
    """T of one request: snapshots as of its admission, plus the divergences of its own."""

    def __init__(self, *snapshots: PairCounts, resumed: Iterable[tuple[int, int]] = ()) -> None:
        """`resumed` are (draft id, target id) that the request met on a replica which could not go on with it."""
        before = Counter(pair_of(*ids) for ids in resumed)
        self._known = tuple(counts for counts in (before, *(snapshot.seen for snapshot in snapshots)) if counts)
        self._seen: Counter[int] = Counter()
        self._rescued: Counter[int] = Counter()

    def count(self, draft_id: int, target_id: int) -> int:
        pair = pair_of(draft_id, target_id)
        return self._seen[pair] + sum(counts.get(pair, 0) for counts in self._known)

    def note(self, emitted: Verdict) -> None:
        """Count the divergences whose position was emitted."""
        for met in emitted.seen:
            self._seen[pair_of(met.draft_id, met.target_id)] += 1
        for rescued in emitted.exceptions:
            self._rescued[pair_of(rescued.draft_id, rescued.target_id)] += 1

    @property
    def own(self) -> PairCounts:
        """A copy of what this request has met here. What it met on another replica is that one's to add."""
        return PairCounts(dict(self._seen), dict(self._rescued))
