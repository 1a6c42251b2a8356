"""The slim verifier's half of its protocol: the sessions of every Target that holds a lease. No Ray."""

import time
from dataclasses import dataclass, field

import numpy as np

from serving.deploy.messages import ids_of
from serving.deploy.slim_messages import ScoredItem, SlimAnswer, SlimCall, SlimItem, SlimOpening
from serving.protocols import ScoreRequest, ScoringModel
from serving.types import EMPTY_IDS, Ids


@dataclass
class _Entry:
    """A session as far as its Target has told: committed ids and the last draft behind them."""

    inner_id: str
    opening: SlimOpening
    ids: Ids = field(default_factory=lambda: EMPTY_IDS)
    is_open: bool = False


class SlimTable:
    """Sessions by (owner, session_id) over one local model, which knows them as "owner/session_id"."""

    def __init__(self, model: ScoringModel, incarnation: str) -> None:
        self._model = model
        self._incarnation = incarnation
        self._entries: dict[tuple[str, str], _Entry] = {}

    @property
    def sessions(self) -> list[tuple[str, str]]:
        """(owner, session_id) of every session held."""
        return list(self._entries)

    def handle(self, call: SlimCall) -> SlimAnswer:
        """Apply one call. A call for another incarnation changes nothing and is told to start over."""
        if call.incarnation != self._incarnation:
            return SlimAnswer(self._incarnation, call.number, (None,) * len(call.items))
        started = time.perf_counter()
        for session_id in call.closes:
            self._close((call.owner, session_id))
        entries = [self._updated(call.owner, item) for item in call.items]
        tables = self._scored(entries, call.items)
        return SlimAnswer(self._incarnation, call.number, tables, time.perf_counter() - started)

    def release(self, owner: str) -> int:
        """Forget every session of `owner`; returns how many there were."""
        keys = [key for key in self._entries if key[0] == owner]
        for key in keys:
            self._close(key)
        return len(keys)

    def _updated(self, owner: str, item: SlimItem) -> _Entry | None:
        key = (owner, item.session_id)
        entry = self._entries.get(key)
        if item.opening is not None and (entry is None or entry.opening != item.opening):
            self._close(key)  # another session by the same name
            entry = self._entries[key] = _Entry(f"{owner}/{item.session_id}", item.opening)
        if entry is None or item.base_len > len(entry.ids):
            return None
        entry.ids = np.concatenate([entry.ids[: item.base_len], ids_of(item.new_ids)])
        return entry

    def _scored(self, entries: list[_Entry | None], items: tuple[SlimItem, ...]) -> tuple[ScoredItem | None, ...]:
        asked = [
            (entry, item)
            for entry, item in zip(entries, items, strict=True)
            if entry is not None and item.num_rows and self._has_row(entry)
        ]
        tables = self._model.score([_request(entry, item) for entry, item in asked]) if asked else []
        found = {entry.inner_id: ScoredItem.of(table) for (entry, _), table in zip(asked, tables, strict=True)}
        return tuple(None if entry is None else found.get(entry.inner_id, ScoredItem()) for entry in entries)

    def _has_row(self, entry: _Entry) -> bool:
        """Whether there is a row for the session; without one it has no scores until one is free."""
        if not entry.is_open:
            try:
                self._model.open(entry.inner_id, entry.ids, salt=entry.opening.salt)
            except KeyError:
                return False
            entry.is_open = True
        return True

    def _close(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None and entry.is_open:
            self._model.close(entry.inner_id)


def _request(entry: _Entry, item: SlimItem) -> ScoreRequest:
    return ScoreRequest(
        session_id=entry.inner_id,
        ids=entry.ids,
        num_rows=item.num_rows,
        sampling=entry.opening.sampling,
        prompt_len=entry.opening.prompt_len,
    )
