"""What a pass costs by its number of rows: measured at start-up, then followed while the engine runs."""

from collections.abc import Mapping

import numpy as np

_SMOOTHING = 0.1


class CostModel:
    """Seconds of one verification pass over R rows; linear between the row counts that were measured."""

    def __init__(self, seconds_by_rows: Mapping[int, float]) -> None:
        """`seconds_by_rows` holds at least two row counts."""
        self._rows = np.array(sorted(seconds_by_rows), dtype=np.float64)
        self._seconds = np.array([seconds_by_rows[int(rows)] for rows in self._rows], dtype=np.float64)

    def record(self, rows: int, seconds: float) -> None:
        """Follow one measured pass: the nearest measured row count moves by the relative error at `rows`."""
        nearest = int(np.argmin(np.abs(self._rows - rows)))
        self._seconds[nearest] *= 1.0 + _SMOOTHING * (seconds / self.seconds(rows) - 1.0)

    def seconds(self, rows: float) -> float:
        """Expected seconds of a pass over `rows` rows; beyond the last measured count the last slope goes on."""
        if rows <= self._rows[-1]:
            return float(np.interp(rows, self._rows, self._seconds))
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._rows[-1] - self._rows[-2])
        return float(self._seconds[-1] + max(0.0, slope) * (rows - self._rows[-1]))

    def price(self, batch_size: int, rows: int) -> float:
        """What each row beyond the plain ones costs in a pass of `rows` rows, in tokens of plain decoding.

        A drafted token pays when it is accepted with a higher probability than this.
        """
        plain, extra = self.seconds(batch_size), rows - batch_size
        return max(0.0, self.seconds(rows) - plain) / plain * batch_size / extra if extra > 0 else 0.0

    def plain_tokens(self, seconds: float, batch_size: int) -> float:
        """Tokens that plain decoding of the batch emits in `seconds`."""
        return seconds * batch_size / self.seconds(batch_size)
