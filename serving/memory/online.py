"""The part of CSD's memory that learns while it serves: one set of counts a tenant, grown only."""

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

from serving.memory.correction import EMPTY_COUNTS, PairCounts
from serving.memory.growing import GrowingCounts

MAX_TENANTS = 256
TENANT_CHARS = 16


def tenant_of(salt: str) -> str:
    """What a salt is called in memories, files and messages: not itself. Without a salt it is empty."""
    return hashlib.sha256(salt.encode()).hexdigest()[:TENANT_CHARS] if salt else ""


@dataclass(frozen=True)
class Told:
    """Deltas of this memory by tenant, on their way to others under a number; sent again until acknowledged."""

    number: int
    deltas: dict[str, PairCounts]


class OnlineMemory:
    """Counts by tenant, bounded: the tenant not heard of for longest and the pairs seen least go first.

    The engine thread takes snapshots and adds what ended requests have met; another thread may exchange the counts
    with other memories meanwhile.
    """

    def __init__(self, *, max_pairs: int, max_tenants: int = MAX_TENANTS) -> None:
        self._max_pairs = max_pairs
        self._max_tenants = max_tenants
        self._lock = threading.Lock()
        self._counts: OrderedDict[str, GrowingCounts] = OrderedDict()
        self._untold: dict[str, GrowingCounts] = {}
        self._told = Told(0, {})

    def snapshot(self, salt: str) -> PairCounts:
        """The tenant's counts as of now; they never change."""
        with self._lock:
            tenant = tenant_of(salt)
            if tenant not in self._counts:
                return EMPTY_COUNTS
            self._counts.move_to_end(tenant)
            return self._counts[tenant].counts

    def add(self, salt: str, delta: PairCounts) -> None:
        """What one request of the tenant has met."""
        if len(delta):
            with self._lock:
                tenant = tenant_of(salt)
                self._untold.setdefault(tenant, GrowingCounts(self._max_pairs)).add(delta)
                self._of(tenant).add(delta)

    def tell(self) -> Told:
        """What others have not acknowledged: the same again, or what was added here since."""
        with self._lock:
            if not self._told.deltas:
                untold = {tenant: growing.counts for tenant, growing in self._untold.items()}
                self._told = Told(self._told.number + 1, untold)
                self._untold = {}
            return self._told

    def acknowledge(self, number: int) -> None:
        """Others have what was told under `number`."""
        with self._lock:
            if number == self._told.number:
                self._told = Told(number, {})

    def absorb(self, tenant: str, totals: PairCounts) -> None:
        """Take over totals of all memories, which hold what this one has told and was acknowledged; never shrink."""
        with self._lock:
            own = [self._told.deltas.get(tenant, EMPTY_COUNTS)]
            if tenant in self._untold:
                own.append(self._untold[tenant].counts)
            whole = PairCounts(
                {pair: n + sum(one.seen.get(pair, 0) for one in own) for pair, n in totals.seen.items()},
                {pair: n + sum(one.rescued.get(pair, 0) for one in own) for pair, n in totals.rescued.items()},
            )
            self._of(tenant).raise_to(whole)

    def _of(self, tenant: str) -> GrowingCounts:
        """The tenant's counts, which are about to grow."""
        found = self._counts.setdefault(tenant, GrowingCounts(self._max_pairs))
        self._counts.move_to_end(tenant)
        while len(self._counts) > self._max_tenants:
            self._counts.popitem(last=False)
        return found
