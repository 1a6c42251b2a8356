"""The part of CSD's memory that learns while it serves: one set of counts a tenant, grown only."""

from collections import OrderedDict

from serving.memory.correction import EMPTY_COUNTS, PairCounts

MAX_TENANTS = 256


class OnlineMemory:
    """Counts by tenant, bounded: the tenant not heard of for longest and the pairs seen least go first.

    Deltas wait until the next look, so that several ended requests cost one merge. What was added here and not yet
    taken by `take_deltas` is for the other replicas to hear.
    """

    def __init__(self, *, max_pairs: int, max_tenants: int = MAX_TENANTS) -> None:
        self._max_pairs = max_pairs
        self._max_tenants = max_tenants
        self._counts: OrderedDict[str, PairCounts] = OrderedDict()
        self._waiting: dict[str, list[PairCounts]] = {}
        self._untold: dict[str, list[PairCounts]] = {}
        self._version = 0

    @property
    def version(self) -> int:
        """How many deltas are in the counts: with their source's name, what a snapshot is called."""
        return self._version

    def snapshot(self, salt: str) -> PairCounts:
        """The tenant's counts as of now; they never change."""
        for delta in self._waiting.pop(salt, ()):
            self._merge(salt, delta)
        if salt in self._counts:
            self._counts.move_to_end(salt)
        return self._counts.get(salt, EMPTY_COUNTS)

    def add(self, salt: str, delta: PairCounts) -> None:
        """What one request of the tenant has met."""
        if len(delta):
            self._version += 1
            self._waiting.setdefault(salt, []).append(delta)
            self._untold.setdefault(salt, []).append(delta)

    def absorb(self, salt: str, delta: PairCounts) -> None:
        """What requests of the tenant have met elsewhere."""
        if len(delta):
            self._version += 1
            self._waiting.setdefault(salt, []).append(delta)

    def take_deltas(self) -> dict[str, PairCounts]:
        """What was added here since the last call, by tenant."""
        untold, self._untold = self._untold, {}
        return {salt: self._sum(deltas) for salt, deltas in untold.items()}

    def _sum(self, deltas: list[PairCounts]) -> PairCounts:
        total = EMPTY_COUNTS
        for delta in deltas:
            total = total.merged(delta, max_pairs=self._max_pairs)
        return total

    def _merge(self, salt: str, delta: PairCounts) -> None:
        self._counts[salt] = self._counts.get(salt, EMPTY_COUNTS).merged(delta, max_pairs=self._max_pairs)
        while len(self._counts) > self._max_tenants:
            self._counts.popitem(last=False)
