"""What a pass costs by its number of rows: measured at start-up, then followed while the engine runs."""

from collections.abc import Mapping

import numpy as np

_SMOOTHING = 0.1
_COMMON = 0.02  # a machine that has become slower is slower at every row count
_MOST_ERROR = 2.0


class CostModel:
    """Seconds of one verification pass over R rows; linear between the row counts that were measured."""

    def __init__(self, seconds_by_rows: Mapping[int, float]) -> None:
        """`seconds_by_rows` holds at least two row counts."""
        self._rows = np.array(sorted(seconds_by_rows), dtype=np.float64)
        self._seconds = np.array([seconds_by_rows[int(rows)] for rows in self._rows], dtype=np.float64)

    def record(self, rows: int, seconds: float) -> None:
        """Follow one measured pass: its neighbours move by the relative error, by nearness; the others by a part."""
        error = min(_MOST_ERROR, seconds / self.seconds(rows) - 1.0)  # a pass may be held up for seconds by others
        place = np.interp(rows, self._rows, np.arange(len(self._rows)))
        nearness = np.maximum(0.0, 1.0 - np.abs(np.arange(len(self._rows)) - place))
        self._seconds *= 1.0 + error * np.maximum(_COMMON, _SMOOTHING * nearness)

    def seconds(self, rows: float) -> float:
        """Expected seconds of a pass over `rows` rows; beyond the last measured count the last slope goes on."""
        if rows <= self._rows[-1]:
            return float(np.interp(rows, self._rows, self._seconds))
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._rows[-1] - self._rows[-2])
        return float(self._seconds[-1] + max(0.0, slope) * (rows - self._rows[-1]))

    def price(self, batch_size: int, rows: int) -> float:
        """What each row beyond the plain ones costs in a pass of `rows` rows, in tokens of plain decoding."""
        plain, extra = self.seconds(batch_size), rows - batch_size
        return max(0.0, self.seconds(rows) - plain) / plain * batch_size / extra if extra > 0 else 0.0

    def next_price(self, batch_size: int, rows: int) -> float:
        """What a row costs beyond `rows`, if each session gets one more: a drafted token with a better chance pays."""
        return max(0.0, self.seconds(rows + batch_size) - self.seconds(rows)) / self.seconds(batch_size)

    def plain_tokens(self, seconds: float, batch_size: int) -> float:
        """Tokens that plain decoding of the batch emits in `seconds`."""
        return seconds * batch_size / self.seconds(batch_size)
