"""Whether served traffic still looks like what a profile was calibrated on, by its latest first mismatches."""

from collections import deque
from collections.abc import Sequence

from serving.memory.drift import LEAST_MISMATCHES, drift_of


class DriftWatch:
    """Total variation distance of the last LEAST_MISMATCHES or more from `expected`, shares by regret."""

    def __init__(self, expected: Sequence[float]) -> None:
        self._expected = expected
        self._totals: deque[tuple[int, ...]] = deque([(0,) * len(expected)])

    def look(self, totals: Sequence[int]) -> float | None:
        """From sums that only grow; None until there are enough."""
        if tuple(totals) != self._totals[-1]:
            self._totals.append(tuple(totals))
        while len(self._totals) > 2 and sum(totals) - sum(self._totals[1]) >= LEAST_MISMATCHES:
            self._totals.popleft()
        latest = [new - old for old, new in zip(self._totals[0], totals, strict=True)]
        return drift_of(latest, self._expected)
