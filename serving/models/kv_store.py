"""Keys and values of every sequence: one row of slots a sequence, all rows in one tensor a layer.

A row knows the ids its slots were computed from, so what is valid for a new text is simply their common prefix:
rollback, reuse of a shared prefix and recovery are one comparison. Closed rows keep their content until the row
is needed, least recently used first.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from serving.models.big_pages import BigPages
from serving.types import Ids, common_prefix

# A prefix shorter than this is cheaper to compute than to look after.
MIN_SHARED = 16


@dataclass(frozen=True)
class KVShape:
    """Heads and head dimension of one layer's cache."""

    num_heads: int
    head_dim: int


@dataclass
class Row:
    """`capacity` slots of one sequence; ids[:length] is what they hold."""

    index: int
    ids: Ids
    length: int = 0
    session_id: str | None = None
    salt: str = ""
    last_used: int = 0

    @property
    def is_free(self) -> bool:
        return self.session_id is None

    def shared_prefix(self, ids: Ids) -> int:
        """How many leading tokens of `ids` this row already holds."""
        return common_prefix(self.ids[: self.length], ids)


@dataclass(eq=False)
class KVStore:
    """`num_rows` rows of `capacity` slots for each layer in `shapes`; its bytes are planned before it is made.

    keys[layer] and values[layer] are [all_rows, num_heads, capacity, head_dim]: a head's part of a row is in one piece.
    Where a drafter reads the model's features, `features` is [all_rows, capacity, len(feature_layers) * hidden]: what
    entered those layers (the number of layers itself: what left the last one), as valid as the slot's keys are.
    `all_rows` is num_rows, and one more behind them, for padding, where attention over the store is one kernel
    (`has_flash`).
    """

    shapes: list[KVShape]
    num_rows: int
    capacity: int
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    feature_layers: tuple[int, ...] = ()
    hidden: int = 0
    has_flash: bool = False

    def __post_init__(self) -> None:
        self._pages = BigPages()
        self.keys = [self._empty(shape) for shape in self.shapes]
        self.values = [self._empty(shape) for shape in self.shapes]
        width = len(self.feature_layers) * self.hidden
        self.features = torch.empty(self.all_rows, self.capacity, width, dtype=self.dtype, device=self.device)
        self.rows = [Row(i, np.zeros(self.capacity, dtype=np.int32)) for i in range(self.num_rows)]
        self._by_session: dict[str, Row] = {}
        self._clock = 0

    def _empty(self, shape: KVShape) -> Tensor:
        size = (self.all_rows, shape.num_heads, self.capacity, shape.head_dim)
        if self.device.type == "cpu":
            return self._pages.empty(size, self.dtype)
        return torch.empty(size, dtype=self.dtype, device=self.device)

    @property
    def all_rows(self) -> int:
        """Rows that take memory."""
        return self.num_rows + self.has_flash

    @staticmethod
    def planned_bytes(
        shapes: list[KVShape], *, num_rows: int, capacity: int, dtype: torch.dtype, feature_width: int = 0
    ) -> int:
        """Bytes that a store of this size takes."""
        slot = sum(2 * s.num_heads * s.head_dim for s in shapes) + feature_width
        return num_rows * capacity * slot * dtype.itemsize

    @property
    def untouched_bytes(self) -> int:
        """Bytes of the rows that no sequence has had yet."""
        return self.planned_bytes(
            self.shapes,
            num_rows=sum(row.last_used == 0 for row in self.rows),
            capacity=self.capacity,
            dtype=self.dtype,
            feature_width=len(self.feature_layers) * self.hidden,
        )

    @property
    def num_open(self) -> int:
        return len(self._by_session)

    def open(self, session_id: str, ids: Ids, *, salt: str = "") -> int:
        """Reserve a row; returns how many leading tokens of `ids` it holds already, shared within `salt` only.

        The free row with the longest such prefix is taken as it is; a longer one in a busy row is copied.
        Raises KeyError if no row is free: admission must prevent that.
        """
        free = [row for row in self.rows if row.is_free]
        if not free:
            raise KeyError(f"no free KV row for {session_id!r}: {self.num_rows} rows are open")
        shared = self._shared(ids, salt)
        own = max(free, key=lambda row: (shared.get(row.index, 0), -row.last_used))
        if shared.get(own.index, 0) < MIN_SHARED:
            own = min(free, key=lambda row: (row.length > 0, row.last_used))
            own.length = 0
        own.session_id, own.salt = session_id, salt
        self._touch(own)
        self._by_session[session_id] = own
        return self.adopt(own, ids, shared)

    def adopt(self, own: Row, ids: Ids, shared: dict[int, int] | None = None) -> int:
        """Copy into `own` the longest prefix of `ids` that another row of its salt holds, if that is worth it.

        Returns how many leading tokens of `ids` it holds then.
        """
        shared = self._shared(ids, own.salt) if shared is None else shared
        best = max(shared, key=lambda index: shared[index], default=own.index)
        if shared.get(best, 0) >= own.shared_prefix(ids) + MIN_SHARED:
            self._copy_prefix(self.rows[best], own, shared[best])
        return own.shared_prefix(ids)

    def _shared(self, ids: Ids, salt: str) -> dict[int, int]:
        """By row, how many leading tokens of `ids` it holds, within `salt` only."""
        return {row.index: row.shared_prefix(ids) for row in self.rows if row.length and row.salt == salt}

    def row(self, session_id: str) -> Row:
        """The open row of a session. KeyError if it has none."""
        row = self._by_session[session_id]
        self._touch(row)
        return row

    def close(self, session_id: str) -> None:
        """Free the row, keeping its content for later requests; an unknown session changes nothing."""
        row = self._by_session.pop(session_id, None)
        if row is not None:
            row.session_id = None

    def keep_features(self, rows: Tensor, positions: Tensor, inputs: Tensor) -> None:
        """Store what entered the feature layers, inputs[layer, T, H], at slots (rows i64[T], positions i64[T])."""
        if not self.feature_layers:
            return
        slots, at = self.features.flatten(0, 1), rows * self.capacity + positions
        for layer, numbers in enumerate(inputs):
            # Not slots[at] = ...: from 3,000 numbers on torch splits that among OpenMP threads, which then spin for
            # milliseconds on the cores that the next kernel wants. This, and index_select, it splits from 32,768 on.
            place = slice(layer * self.hidden, (layer + 1) * self.hidden)
            slots[:, place].index_copy_(0, at, numbers.to(self.dtype))

    def rollback(self, session_id: str, length: int) -> None:
        """Forget what lies behind `length` tokens. O(1)."""
        row = self._by_session[session_id]
        row.length = max(0, min(row.length, length))

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        for session_id, row in self._by_session.items():
            assert row.session_id == session_id, f"row {row.index} is of {row.session_id!r}, not {session_id!r}"
        owned = [row for row in self.rows if not row.is_free]
        assert len(owned) == len(self._by_session), f"{len(owned)} rows owned, {len(self._by_session)} sessions"
        for row in self.rows:
            assert 0 <= row.length <= self.capacity, f"row {row.index} has length {row.length}"

    def _copy_prefix(self, source: Row, target: Row, length: int) -> None:
        if source is target:
            return
        for cache in (*self.keys, *self.values):
            cache[target.index, :, :length].copy_(cache[source.index, :, :length])
        self.features[target.index, :length].copy_(self.features[source.index, :length])
        target.ids[:length] = source.ids[:length]
        target.length = length

    def _touch(self, row: Row) -> None:
        self._clock += 1
        row.last_used = self._clock
