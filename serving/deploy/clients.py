"""A drafter in another process behind the Drafter protocol. No Ray: a `Worker` is whatever takes a call.

Whatever goes wrong over there, the round goes on here without a draft, and `degraded` says so.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from serving.deploy.hops import Hops
from serving.deploy.messages import DraftAnswer, DraftCall
from serving.deploy.sync import SessionSync
from serving.protocols import DraftRequest, Outcome, PendingDrafts, ReadFeatures
from serving.types import EMPTY_DRAFT, Draft, Ids

log = logging.getLogger("ray.serve")

_REST_AFTER_FAILURE_S = 1.0


class WorkerLostError(Exception):
    """The drafter's process is gone; its sessions went with it."""


class WorkerFailedError(Exception):
    """The drafter answered with an error of its own; it is still there."""


class Reply(Protocol):
    """An answer that is on its way."""

    def result(self, timeout_s: float) -> DraftAnswer:
        """Raises TimeoutError, WorkerLostError or WorkerFailedError."""
        ...


class Worker(Protocol):
    """Takes calls in order. `send` returns at once and never raises."""

    def send(self, call: DraftCall) -> Reply: ...


@dataclass(frozen=True)
class Link:
    """A leased drafter. The incarnation names its process: sessions of another one are unknown to it."""

    worker: Worker
    incarnation: str


@dataclass(frozen=True)
class NoDrafts:
    """What a drafter that cannot be reached answers."""

    num_requests: int

    def result(self) -> list[Draft]:
        return [EMPTY_DRAFT] * self.num_requests


@dataclass(frozen=True)
class _Pending:
    drafter: "RemoteDrafter"
    link: Link
    call: DraftCall
    reply: Reply
    sent_s: float

    def result(self) -> list[Draft]:
        return self.drafter.take(self)


class RemoteDrafter:
    """Drafter over a leased worker: one call a round, a deadline on each, no trust in either.

    The Drafter methods belong to the engine thread; `connect`, `tidy` and `degraded` to any. A worker that
    missed a deadline is left alone until it has answered that very call; the late answer is thrown away.
    """

    def __init__(self, owner: str, *, timeout_s: float, on_lost: Callable[[], None]) -> None:
        self._sync = SessionSync(owner)
        self._sync_lock = threading.Lock()
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._link: Link | None = None
        self._late: Reply | None = None
        self._rests_until_s = 0.0
        self.hops = Hops()

    def feed(self, read_features: ReadFeatures) -> None:
        """For a drafter that reads the target's features: how they are read, by the engine thread."""
        self._sync.feed(read_features)

    def connect(self, link: Link | None) -> None:
        """Use this lease from now on, or none. May be called from any thread."""
        if link is None or self._link is None or self._link.incarnation != link.incarnation:
            self._late = None
            self._rests_until_s = 0.0
        self._link = link

    @property
    def degraded(self) -> bool:
        return self._reachable is None

    def start(self, requests: Sequence[DraftRequest]) -> PendingDrafts:
        link = self._reachable
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
        link = self._reachable
        with self._sync_lock:
            if link is not None and self._sync.has_closes and not self._sync.num_sessions:
                self._adopt(link)
                link.worker.send(self._sync.flush())

    def take(self, pending: _Pending) -> list[Draft]:
        """The drafts of a call that was started; waits for them at most `timeout_s`."""
        nothing = [EMPTY_DRAFT] * len(pending.call.items)
        try:
            answer = self._awaited(pending)
            with self._sync_lock:
                return self._sync.absorb(pending.call, answer)
        except TimeoutError:
            if self._link is pending.link:
                log.warning("drafter %s: no answer in %.1f s", pending.link.incarnation, self._timeout_s)
                self._late = pending.reply
        except WorkerFailedError as error:
            log.warning("drafter %s failed: %s", pending.link.incarnation, error)
            self._rests_until_s = time.monotonic() + _REST_AFTER_FAILURE_S
        except WorkerLostError:
            self._lose(pending.link)
        return nothing

    def _awaited(self, pending: _Pending) -> DraftAnswer:
        asked_s = time.perf_counter()
        answer = pending.reply.result(self._timeout_s)
        self.hops = self.hops.plus(
            sent_s=pending.sent_s,
            asked_s=asked_s,
            answered_s=time.perf_counter(),
            compute_s=answer.compute_s,
        )
        return answer

    @property
    def _reachable(self) -> Link | None:
        link = self._link
        if link is None or time.monotonic() < self._rests_until_s or not self._has_answered(link):
            return None
        return link

    def _has_answered(self, link: Link) -> bool:
        """Whether the call that missed its deadline, if there is one, is through by now."""
        late = self._late
        if late is None:
            return True
        try:
            late.result(0.0)
        except TimeoutError:
            return False
        except WorkerLostError:
            self._lose(link)
            return False
        except WorkerFailedError as error:
            log.warning("drafter %s failed late: %s", link.incarnation, error)
        self._late = None
        return True

    def _adopt(self, link: Link) -> None:
        if self._sync.incarnation != link.incarnation:
            self._sync.reset(link.incarnation)

    def _lose(self, link: Link) -> None:
        if self._link is link:
            log.warning("drafter %s is gone", link.incarnation)
            self._link = None
            self._on_lost()
