"""The figures of both benchmarks: time per output token, spreads, accepted length, and tables of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Cell: TypeAlias = str | int | float | None


@dataclass(frozen=True)
class Timing:
    """When one answer's tokens came, in seconds from its start; None where nothing came."""

    tokens: int
    first_s: float | None
    last_s: float | None

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per output token after the first; None for less than two tokens."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return 1000.0 * (self.last_s - self.first_s) / (self.tokens - 1)


@dataclass(frozen=True)
class Spread:
    """Median and 95th percentile, between neighbours linearly."""

    p50: float
    p95: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Of the values that are there; None without any."""
        there = [value for value in values if value is not None]
        if not there:
            return None
        p50, p95 = np.percentile(there, (50, 95))
        return cls(round(float(p50), 3), round(float(p95), 3))


def accepted_length(*, accepted: int, rounds: int, drafts_empty: int) -> float:
    """Accepted tokens per round that had a draft; 0 where none had."""
    drafted = rounds - drafts_empty
    return round(accepted / drafted, 3) if drafted else 0.0


def table(rows: Sequence[Mapping[str, Cell]]) -> str:
    """Rows of the same columns as aligned text; a column in which nothing is known is left out."""
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else []
    lines = [columns, *(["-" if row[name] is None else str(row[name]) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
