"""What strict would have done, as a histogram: the regret of the first mismatch of each block, at no extra pass."""

from bisect import bisect_right
from collections.abc import Sequence

EDGES = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # nats
NUM_BINS = len(EDGES) + 1
LEAST_MISMATCHES = 500  # fewer differ from their own distribution by more than an alarm should tolerate


def bin_of(regret: float) -> int:
    """0 for regret below the first edge, NUM_BINS - 1 from the last one on."""
    return bisect_right(EDGES, regret)


def shares_of(counts: Sequence[int]) -> tuple[float, ...]:
    """Counts as shares that add up to 1; zeros where nothing was counted."""
    total = sum(counts)
    return tuple(count / total if total else 0.0 for count in counts)


def drift(expected: Sequence[float], found: Sequence[float]) -> float:
    """Total variation distance of two histograms of shares: 0 where they agree, 1 where they share no bin."""
    return 0.5 * sum(abs(a - b) for a, b in zip(expected, found, strict=True))


def drift_of(counts: Sequence[int], expected: Sequence[float]) -> float | None:
    """Of counts from expected shares; None for fewer than LEAST_MISMATCHES."""
    return drift(expected, shares_of(counts)) if sum(counts) >= LEAST_MISMATCHES else None
