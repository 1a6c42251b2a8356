"""Intervals by resampling prompts: what a mean or a ratio of sums could have been with other prompts of the kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

NUM_RESAMPLES = 2000
LEAST_SAMPLES = 6  # resampled by fewer, an interval is narrower than the truth
_COVERAGE = (2.5, 97.5)


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % percentile interval; of fewer than LEAST_SAMPLES values it has no ends."""

    value: float
    low: float | None
    high: float | None

    @property
    def ends(self) -> tuple[float, float] | None:
        """(low, high)."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def __str__(self) -> str:
        told = "no interval" if self.ends is None else f"[{self.low:.3f}, {self.high:.3f}]"
        return f"{self.value:.3f}{', ' if self.ends is None else ' '}{told}"


def mean(values: Sequence[float], *, seed: int = 0) -> Interval | None:
    """Of one value a prompt; None without any."""
    return _interval([np.asarray(values, dtype=np.float64)], lambda sums: sums[0], seed=seed) if len(values) else None


def ratio(numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0) -> Interval | None:
    """Sum over sum, prompts resampled in pairs; None where there is nothing to divide by."""
    if not len(denominators) or sum(denominators) <= 0.0:
        return None
    columns = [np.asarray(column, dtype=np.float64) for column in (numerators, denominators)]
    return _interval(columns, lambda means: means[0] / np.maximum(means[1], 1e-12), seed=seed)


def _interval(columns: list[Values], statistic: Callable[[list[Values]], Values], *, seed: int) -> Interval:
    size = len(columns[0])
    (value,) = statistic([column.mean(keepdims=True) for column in columns])
    if size < LEAST_SAMPLES:
        return Interval(round(float(value), 6), None, None)
    picks = np.random.default_rng(seed).integers(size, size=(NUM_RESAMPLES, size))
    resampled = statistic([column[picks].mean(axis=1) for column in columns])
    low, high = np.percentile(resampled, _COVERAGE)
    return Interval(round(float(value), 6), round(float(low), 6), round(float(high), 6))
