"""A drafter in another process behind the Drafter protocol. No Ray: a `Worker` is whatever takes a call.

Whatever goes wrong over there, the round goes on here without a draft, and `degraded` says so.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from serving.deploy.hops import Hops
from serving.deploy.link import Link, Reach, Reply
from serving.deploy.messages import DraftAnswer, DraftCall
from serving.deploy.sync import SessionSync
from serving.protocols import DraftRequest, Outcome, PendingDrafts, ReadFeatures
from serving.types import EMPTY_DRAFT, Draft, Ids

DrafterLink: TypeAlias = Link[DraftCall, DraftAnswer]


@dataclass(frozen=True)
class NoDrafts:
    """What a drafter that cannot be reached answers."""

    num_requests: int

    def result(self) -> list[Draft]:
        return [EMPTY_DRAFT] * self.num_requests


@dataclass(frozen=True)
class _Pending:
    drafter: "RemoteDrafter"
    link: DrafterLink
    call: DraftCall
    reply: Reply[DraftAnswer]
    sent_s: float

    def result(self) -> list[Draft]:
        return self.drafter.take(self)


class RemoteDrafter:
    """Drafter over a leased worker: one call a round, a deadline on each, no trust in either.

    The Drafter methods belong to the engine thread; `connect`, `tidy` and `degraded` to any.
    """

    def __init__(self, owner: str, *, timeout_s: float, on_lost: Callable[[], None]) -> None:
        self._sync = SessionSync(owner)
        self._sync_lock = threading.Lock()
        self._reach: Reach[DraftCall, DraftAnswer] = Reach("drafter", timeout_s=timeout_s, on_lost=on_lost)
        self.hops = Hops()

    def feed(self, read_features: ReadFeatures) -> None:
        """For a drafter that reads the target's features: how they are read, by the engine thread."""
        self._sync.feed(read_features)

    def connect(self, link: DrafterLink | None) -> None:
        """Use this lease from now on, or none. May be called from any thread."""
        self._reach.connect(link)

    @property
    def degraded(self) -> bool:
        return self._reach.link is None

    def start(self, requests: Sequence[DraftRequest]) -> PendingDrafts:
        link = self._reach.link
        if link is None:
            return NoDrafts(len(requests))
        with self._sync_lock:
            self._adopt(link)
            sent_s = time.perf_counter()
            replies = [(call, link.worker.send(call)) for call in self._sync.prepare(requests)]
        return _Pending(self, link, *replies[-1], sent_s)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        with self._sync_lock:
            self._sync.observe(outcomes)

    def close(self, session_id: str, ids: Ids | None) -> None:
        with self._sync_lock:
            self._sync.close(session_id, ids)
        self.tidy()

    def tidy(self) -> None:
        """Send word of ended sessions, unless open ones will draft and take it along."""
        link = self._reach.link
        with self._sync_lock:
            if link is not None and self._sync.has_closes and not self._sync.num_sessions:
                self._adopt(link)
                link.worker.send(self._sync.flush())

    def take(self, pending: _Pending) -> list[Draft]:
        """The drafts of a call that was started; waits for them at most the timeout."""
        asked_s = time.perf_counter()
        answer = self._reach.answer(pending.link, pending.reply)
        if answer is None:
            return [EMPTY_DRAFT] * len(pending.call.items)
        self.hops = self.hops.plus(
            sent_s=pending.sent_s,
            asked_s=asked_s,
            answered_s=time.perf_counter(),
            compute_s=answer.compute_s,
        )
        with self._sync_lock:
            return self._sync.absorb(pending.call, answer)

    def _adopt(self, link: DrafterLink) -> None:
        if self._sync.incarnation != link.incarnation:
            self._sync.reset(link.incarnation)
