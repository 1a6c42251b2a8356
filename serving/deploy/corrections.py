"""CSD's online memory across Target replicas: a hub adds up what each has met, and tells each the totals. No Ray.

Counts only grow, and totals are taken over by their maximum, so a message may come twice, late or in parts. A hub that
dies loses what came after its last save; what it had saved and not yet acknowledged counts twice.
"""

import logging
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serving.errors import ConfigError
from serving.memory.correction import EMPTY_COUNTS, PairCounts
from serving.memory.correction_file import load_all, save_counts
from serving.memory.online import MAX_TENANTS, OnlineMemory

log = logging.getLogger("ray.serve")

MAX_PAIRS_IN_MESSAGE = 2048  # 24 bytes each


@dataclass(frozen=True, slots=True)
class PackedCounts:
    """Counts of one tenant as int64 bytes: pairs, seen, rescued."""

    tenant: str
    pairs: bytes
    seen: bytes
    rescued: bytes

    @classmethod
    def of(cls, tenant: str, counts: PairCounts) -> "PackedCounts":
        pairs = list(counts.seen)
        columns = (pairs, [counts.seen[pair] for pair in pairs], [counts.rescued.get(pair, 0) for pair in pairs])
        return cls(tenant, *(np.array(column, dtype=np.int64).tobytes() for column in columns))

    @property
    def counts(self) -> PairCounts:
        pairs, seen, rescued = (np.frombuffer(c, np.int64).tolist() for c in (self.pairs, self.seen, self.rescued))
        return PairCounts(dict(zip(pairs, seen, strict=True)), {p: n for p, n in zip(pairs, rescued, strict=True) if n})


@dataclass(frozen=True, slots=True)
class Exchange:
    """A replica's unacknowledged deltas, and which of the hub's changes it has: up to `since` of `incarnation`."""

    replica: str
    number: int
    part: int
    deltas: tuple[PackedCounts, ...]
    incarnation: str
    since: int


@dataclass(frozen=True, slots=True)
class Totals:
    """What has changed at the hub, oldest first, up to `version`; `has_more` asks for another call."""

    incarnation: str
    version: int
    totals: tuple[PackedCounts, ...]
    has_more: bool


class CorrectionHub:
    """The totals of every replica, by tenant, and when each pair last changed. One call at a time."""

    def __init__(self, *, identity: str, max_pairs: int, path: Path | None, max_tenants: int = MAX_TENANTS) -> None:
        """Takes up what `path` holds. A file that is damaged or of other models is logged and never replaced."""
        self._identity = identity
        self._max_pairs = max_pairs
        self._max_tenants = max_tenants
        self._path = path
        self._incarnation = uuid.uuid4().hex[:12]
        self._counts: OrderedDict[str, PairCounts] = OrderedDict()
        self._changes: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._version = 0
        self._heard: dict[str, tuple[int, int]] = {}
        self._saved_version = 0
        self.failed_saves = 0  # since the last that succeeded
        self._has_foreign_file = False
        if path is not None and path.is_file():
            self._take_up(path)

    @property
    def has_unsaved(self) -> bool:
        return self._path is not None and self._version != self._saved_version

    def exchange(self, call: Exchange) -> Totals:
        """Add the deltas, unless they came before, and tell what has changed."""
        if (call.number, call.part) > self._heard.get(call.replica, (0, 0)):
            self._heard[call.replica] = (call.number, call.part)
            for packed in call.deltas:
                self._add(packed.tenant, packed.counts)
        return self._since(call.since if call.incarnation == self._incarnation else 0)

    def save(self) -> None:
        """Write everything to the file, if there is one."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            save_counts(self._path, dict(self._counts), identity=self._identity)
        self._saved_version = self._version

    def keep(self) -> None:
        """Save what is new. A failure is counted and logged once; the next call tries again."""
        if not self.has_unsaved or (self._has_foreign_file and self._path is not None and self._path.exists()):
            return
        try:
            self.save()
        except Exception as error:  # noqa: BLE001 - the disk's boundary: whatever it is may pass
            self.failed_saves += 1
            if self.failed_saves == 1:
                log.error("correction memory: %s could not be saved, trying again: %s", self._path, error)
            return
        if self.failed_saves:
            log.info("correction memory: %s is saved again after %d failures", self._path, self.failed_saves)
        self.failed_saves = 0

    def _take_up(self, path: Path) -> None:
        try:
            found = load_all(path, identity=self._identity, field="rule.store")
        except ConfigError as error:
            self._has_foreign_file = True
            log.error("correction memory: %s; counts begin with nothing and are kept once it is moved away", error)
            return
        for tenant, counts in found.items():
            self._add(tenant, counts)
        self._saved_version = self._version

    def _add(self, tenant: str, delta: PairCounts) -> None:
        before = self._counts.get(tenant, EMPTY_COUNTS)
        merged = before.merged(delta, max_pairs=self._max_pairs)
        self._counts[tenant] = merged
        self._counts.move_to_end(tenant)
        for pair in delta.seen:
            if pair in merged.seen:
                self._version += 1
                self._changes[tenant, pair] = self._version
                self._changes.move_to_end((tenant, pair))
        for pair in before.seen.keys() - merged.seen.keys():
            self._changes.pop((tenant, pair), None)
        while len(self._counts) > self._max_tenants:
            gone, counts = self._counts.popitem(last=False)
            for pair in counts.seen:
                self._changes.pop((gone, pair), None)

    def _since(self, version: int) -> Totals:
        changed = [(key, at) for key, at in self._changes.items() if at > version]
        part = changed[:MAX_PAIRS_IN_MESSAGE]
        by_tenant: dict[str, list[int]] = {}
        for (tenant, pair), _ in part:
            by_tenant.setdefault(tenant, []).append(pair)
        return Totals(
            self._incarnation,
            part[-1][1] if part else self._version,
            tuple(PackedCounts.of(tenant, self._counts[tenant].only(pairs)) for tenant, pairs in by_tenant.items()),
            len(part) < len(changed),
        )


class CorrectionSync:
    """One replica's side: tells the hub what its memory has met, and takes over the totals."""

    def __init__(self, memory: OnlineMemory, call: Callable[[Exchange], Awaitable[Totals]]) -> None:
        self._memory = memory
        self._call = call
        self._replica = uuid.uuid4().hex[:12]
        self._incarnation = ""
        self._since = 0

    async def exchange(self) -> None:
        """Once there and back, in as many messages as it takes. What fails is told again next time."""
        told = self._memory.tell()
        parts = packed_parts(told.deltas) or [()]
        for number, deltas in enumerate(parts, 1):
            answer = await self._send(told.number, number, deltas)
        self._memory.acknowledge(told.number)
        self._take(answer)
        while answer.has_more:
            answer = await self._send(told.number, len(parts), ())
            self._take(answer)

    async def _send(self, number: int, part: int, deltas: tuple[PackedCounts, ...]) -> Totals:
        return await self._call(Exchange(self._replica, number, part, deltas, self._incarnation, self._since))

    def _take(self, answer: Totals) -> None:
        for packed in answer.totals:
            self._memory.absorb(packed.tenant, packed.counts)
        self._incarnation, self._since = answer.incarnation, answer.version


def packed_parts(deltas: dict[str, PairCounts]) -> list[tuple[PackedCounts, ...]]:
    """Deltas in messages of one tenant and at most MAX_PAIRS_IN_MESSAGE pairs each."""
    parts: list[tuple[PackedCounts, ...]] = []
    for tenant, delta in deltas.items():
        pairs = list(delta.seen)
        for start in range(0, len(pairs), MAX_PAIRS_IN_MESSAGE):
            parts.append((PackedCounts.of(tenant, delta.only(pairs[start : start + MAX_PAIRS_IN_MESSAGE])),))
    return parts
