"""Features that leave the Target: rows as bytes on its side, a store of what came on the drafter's."""

import numpy as np
import torch
from torch import Tensor

from serving.models.packed_lm import PackedLM
from serving.protocols import FeatureRows
from serving.types import Ids

# Two bytes a number, whatever dtype the target runs in: a head learns from bfloat16 features too.
_WIRE = torch.bfloat16


def feature_rows(target: PackedLM, session_id: str, ids: Ids, start: int) -> FeatureRows:
    """What `target` knows of the positions of `ids` from `start` on, to be sent. KeyError without such a session."""
    rows = target.features(session_id, ids, start).to(_WIRE)
    return FeatureRows(start, len(rows), rows.cpu().view(torch.int16).numpy().tobytes())


class ShippedFeatures:
    """A FeatureSource of sessions whose features come by message; `width` numbers a position."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._rows: dict[str, tuple[Tensor, int]] = {}

    def keep(self, session_id: str, rows: FeatureRows) -> None:
        """Take `rows` for a session. Rows that would leave a gap are dropped: then nothing behind it is known."""
        buffer, length = self._rows.get(session_id, (torch.empty(0, self._width, dtype=_WIRE), 0))
        if rows.start > length:
            return
        stop = rows.start + rows.count
        if stop > len(buffer):
            grown = torch.empty(max(256, 2 * stop), self._width, dtype=_WIRE)
            grown[:length] = buffer[:length]
            buffer = grown
        flat = torch.from_numpy(np.frombuffer(rows.data, dtype=np.int16).copy())
        buffer[rows.start : stop] = flat.view(_WIRE).view(rows.count, self._width)
        self._rows[session_id] = (buffer, stop)

    def features(self, session_id: str, ids: Ids, start: int) -> Tensor:
        """As PackedLM.features; a session of which nothing came has none."""
        if session_id not in self._rows:
            return torch.empty(0, self._width, dtype=_WIRE)
        buffer, length = self._rows[session_id]
        return buffer[start : min(length, len(ids))]

    def forget(self, session_id: str) -> None:
        self._rows.pop(session_id, None)
