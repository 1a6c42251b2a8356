"""A slim verifier in another process behind the ScoringModel protocol. No Ray.

Out of reach, late or without the text it has no tables: the three tiers then leave the round to the full target.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from serving.deploy.hops import Hops
from serving.deploy.link import Link, Reach
from serving.deploy.messages import MAX_IDS_BYTES, ids_bytes, packed
from serving.deploy.slim_messages import ScoredItem, SlimAnswer, SlimCall, SlimItem, SlimOpening
from serving.protocols import ScoreRequest
from serving.types import EMPTY_IDS, Ids, ScoreTable, common_prefix

SlimLink: TypeAlias = Link[SlimCall, SlimAnswer]


class RemoteSlim:
    """One call a round for the whole batch. `connect`, `tidy` and `degraded` belong to any thread, the rest to one."""

    def __init__(self, owner: str, *, timeout_s: float, on_lost: Callable[[], None]) -> None:
        self._owner = owner
        self._reach: Reach[SlimCall, SlimAnswer] = Reach("slim verifier", timeout_s=timeout_s, on_lost=on_lost)
        self._lock = threading.Lock()
        self._incarnation = ""
        self._number = 0
        self._salts: dict[str, str] = {}
        self._held: dict[str, Ids] = {}
        self._closes: list[str] = []
        self.hops = Hops()

    def connect(self, link: SlimLink | None) -> None:
        """Use this lease from now on, or none. May be called from any thread."""
        self._reach.connect(link)

    @property
    def degraded(self) -> bool:
        return self._reach.link is None

    def open(self, session_id: str, ids: Ids, *, salt: str = "") -> int:
        """Nothing travels yet, so nothing is known to be there."""
        self._salts[session_id] = salt
        return 0

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreTable | None]:
        link = self._reach.link
        if link is None:
            return [None] * len(requests)
        started = time.perf_counter()
        with self._lock:
            self._adopt(link)
            sent = [(call, link.worker.send(call)) for call in self._calls(requests)]
        asked = time.perf_counter()
        answer = self._reach.answer(link, sent[-1][1])
        if answer is None:
            return [None] * len(requests)
        self.hops = self.hops.plus(
            sent_s=started, asked_s=asked, answered_s=time.perf_counter(), compute_s=answer.compute_s
        )
        if (answer.incarnation, answer.number) != (self._incarnation, sent[-1][0].number):
            return [None] * len(requests)
        return [self._absorbed(request, found) for request, found in zip(requests, answer.tables, strict=True)]

    def rollback(self, session_id: str, length: int) -> None:
        """The callee hears of it when it is asked next."""
        with self._lock:
            self._held[session_id] = self._held[session_id][:length]

    def close(self, session_id: str) -> None:
        with self._lock:
            self._salts.pop(session_id, None)
            if self._held.pop(session_id, None) is not None:
                self._closes.append(session_id)
        self.tidy()

    def tidy(self) -> None:
        """Send word of ended sessions, unless open ones will be scored and take it along."""
        link = self._reach.link
        with self._lock:
            if link is not None and self._closes and not self._held:
                self._adopt(link)
                link.worker.send(self._call([]))

    def _adopt(self, link: SlimLink) -> None:
        """A process that knows nothing yet gets every session from 0."""
        if self._incarnation != link.incarnation:
            self._incarnation = link.incarnation
            self._held = dict.fromkeys(self._held, EMPTY_IDS)
            self._closes.clear()

    def _calls(self, requests: Sequence[ScoreRequest]) -> list[SlimCall]:
        """To be sent in order; the answer to the last one counts."""
        items = [self._item(request) for request in requests]
        if sum(len(item.new_ids) for item in items) <= MAX_IDS_BYTES:
            return [self._call(items)]
        ahead = [self._call(group) for group in packed([piece for item in items for piece in item.pieces()])]
        return [*ahead, self._call([item.without_ids() for item in items])]

    def _call(self, items: Sequence[SlimItem]) -> SlimCall:
        self._number += 1
        closes, self._closes = tuple(self._closes), []
        return SlimCall(self._owner, self._incarnation, self._number, closes, tuple(items))

    def _item(self, request: ScoreRequest) -> SlimItem:
        held = self._held.setdefault(request.session_id, EMPTY_IDS)
        base = common_prefix(held, request.ids)
        self._held[request.session_id] = held[:base]  # should no answer come, that much is there either way
        salt = self._salts[request.session_id]
        opening = None if len(held) else SlimOpening(request.prompt_len, salt, request.sampling)
        return SlimItem(request.session_id, base, ids_bytes(request.ids[base:]), request.num_rows, opening)

    def _absorbed(self, request: ScoreRequest, found: ScoredItem | None) -> ScoreTable | None:
        """Only an answer adds to what the callee is known to hold."""
        self._held[request.session_id] = EMPTY_IDS if found is None else request.ids
        return None if found is None else found.table(request.draft_ids)
