"""The drafter's half of the protocol: the sessions of every Target that holds a lease. No Ray."""

import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from serving.deploy.messages import (
    CloseItem,
    DraftAnswer,
    DraftCall,
    DraftedItem,
    DraftItem,
    OutcomeItem,
    SessionOpening,
    ids_of,
)
from serving.protocols import Drafter, DraftRequest, FeatureRows, Outcome
from serving.types import EMPTY_DRAFT, EMPTY_IDS, Draft, Ids


@dataclass
class _Entry:
    """A session's committed ids as far as its Target has told, and the last draft made from them."""

    inner_id: str
    opening: SessionOpening
    buffer: Ids = field(default_factory=lambda: EMPTY_IDS)
    length: int = 0
    last_number: int = 0
    last_draft: Draft = EMPTY_DRAFT

    @property
    def ids(self) -> Ids:
        return self.buffer[: self.length]

    def extend(self, base_len: int, new_ids: Ids) -> None:
        """Crop to `base_len`, then append; doubles its buffer, so a token costs constant time."""
        length = base_len + len(new_ids)
        if length > len(self.buffer):
            grown = np.zeros(max(256, 2 * length), dtype=np.int32)
            grown[:base_len] = self.buffer[:base_len]
            self.buffer = grown
        self.buffer[base_len:length] = new_ids
        self.length = length


class FeatureKeeper(Protocol):
    """Where features that came with a call go."""

    def keep(self, session_id: str, rows: FeatureRows) -> None: ...

    def forget(self, session_id: str) -> None: ...


class DraftTable:
    """Sessions by (owner, session_id) over one local drafter, which knows them as "owner/session_id"."""

    def __init__(self, drafter: Drafter, incarnation: str, features: FeatureKeeper | None = None) -> None:
        self._drafter = drafter
        self._incarnation = incarnation
        self._features = features
        self._entries: dict[tuple[str, str], _Entry] = {}

    @property
    def sessions(self) -> list[tuple[str, str]]:
        """(owner, session_id) of every session held."""
        return list(self._entries)

    def handle(self, call: DraftCall) -> DraftAnswer:
        """Apply one call. A call for another incarnation changes nothing and is told to start over."""
        if call.incarnation != self._incarnation:
            return DraftAnswer(self._incarnation, call.number, (None,) * len(call.items))
        started = time.perf_counter()
        self._observe(call.owner, call.outcomes)
        for close in call.closes:
            self._close(call.owner, close)
        entries = [self._updated(call.owner, item) for item in call.items]
        drafts = self._draft(call, entries)
        return DraftAnswer(self._incarnation, call.number, drafts, time.perf_counter() - started)

    def release(self, owner: str) -> int:
        """Forget every session of `owner`, remember none; returns how many there were."""
        keys = [key for key in self._entries if key[0] == owner]
        for key in keys:
            self._forget(self._entries.pop(key), None)
        return len(keys)

    def _forget(self, entry: _Entry, ids: Ids | None) -> None:
        if self._features is not None:
            self._features.forget(entry.inner_id)
        self._drafter.close(entry.inner_id, ids)

    def _updated(self, owner: str, item: DraftItem) -> _Entry | None:
        key = (owner, item.session_id)
        entry = self._entries.get(key)
        if entry is not None and item.opening not in (
            None,
            entry.opening,
        ):  # another session by the same name
            self._forget(self._entries.pop(key), None)
            entry = None
        if entry is None and item.opening is not None:
            entry = self._entries[key] = _Entry(f"{owner}/{item.session_id}", item.opening)
        if entry is None or item.base_len > entry.length:
            return None
        entry.extend(item.base_len, ids_of(item.new_ids))
        if self._features is not None and item.features is not None:
            self._features.keep(entry.inner_id, item.features)
        return entry

    def _draft(self, call: DraftCall, entries: list[_Entry | None]) -> tuple[DraftedItem | None, ...]:
        pairs = zip(entries, call.items, strict=True)
        asked = [(entry, item) for entry, item in pairs if entry is not None and item.max_draft]
        drafts = self._drafter.start([_request(entry, item) for entry, item in asked]).result() if asked else []
        for (entry, _), draft in zip(asked, drafts, strict=True):
            entry.last_number, entry.last_draft = call.number, draft
        found = iter(drafts)
        return tuple(
            None if entry is None else DraftedItem.of(next(found) if item.max_draft else EMPTY_DRAFT)
            for entry, item in zip(entries, call.items, strict=True)
        )

    def _observe(self, owner: str, outcomes: tuple[OutcomeItem, ...]) -> None:
        observed = []
        for outcome in outcomes:
            entry = self._entries.get((owner, outcome.session_id))
            if entry is not None and entry.last_number == outcome.number:
                used = entry.last_draft.clipped(outcome.num_drafted)
                observed.append(Outcome(entry.inner_id, used, outcome.num_accepted))
        if observed:
            self._drafter.observe(observed)

    def _close(self, owner: str, item: CloseItem) -> None:
        entry = self._entries.pop((owner, item.session_id), None)
        if entry is None:
            return
        is_whole = item.remember and item.base_len <= entry.length
        if is_whole:
            entry.extend(item.base_len, ids_of(item.new_ids))
        self._forget(entry, entry.ids if is_whole else None)


def _request(entry: _Entry, item: DraftItem) -> DraftRequest:
    return DraftRequest(
        session_id=entry.inner_id,
        ids=entry.ids,
        prompt_len=entry.opening.prompt_len,
        max_draft=item.max_draft,
        salt=entry.opening.salt,
        sampling=entry.opening.sampling,
        max_by_source=item.max_by_source,
    )
