"""A leased worker seen from a Target: calls with a deadline, and no trust in the other side. No Ray.

A worker that missed a deadline is left alone until it has answered that very call; the late answer is thrown away.
One that answered with an error rests a moment. One that is gone is reported, once.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

log = logging.getLogger("ray.serve")

_REST_AFTER_FAILURE_S = 1.0

CallT_contra = TypeVar("CallT_contra", contravariant=True)
AnswerT_co = TypeVar("AnswerT_co", covariant=True)
CallT = TypeVar("CallT")
AnswerT = TypeVar("AnswerT")


class WorkerLostError(Exception):
    """The worker's process is gone; its sessions went with it."""


class WorkerFailedError(Exception):
    """The worker answered with an error of its own; it is still there."""


class Reply(Protocol[AnswerT_co]):
    """An answer that is on its way."""

    def result(self, timeout_s: float) -> AnswerT_co:
        """Raises TimeoutError, WorkerLostError or WorkerFailedError."""
        ...


class Worker(Protocol[CallT_contra, AnswerT_co]):
    """Takes calls in order. `send` returns at once and never raises."""

    def send(self, call: CallT_contra) -> Reply[AnswerT_co]: ...


@dataclass(frozen=True)
class Link(Generic[CallT, AnswerT]):
    """A leased worker. The incarnation names its process: sessions of another one are unknown to it."""

    worker: Worker[CallT, AnswerT]
    incarnation: str


class Reach(Generic[CallT, AnswerT]):
    """Whether the leased worker of a role can be called, and what becomes of calls to it.

    `connect` may be called from any thread, the rest belongs to the engine's.
    """

    def __init__(self, role: str, *, timeout_s: float, on_lost: Callable[[], None]) -> None:
        self._role = role
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._link: Link[CallT, AnswerT] | None = None
        self._late: Reply[AnswerT] | None = None
        self._rests_until_s = 0.0

    def connect(self, link: Link[CallT, AnswerT] | None) -> None:
        """Use this lease from now on, or none."""
        if link is None or self._link is None or self._link.incarnation != link.incarnation:
            self._late = None
            self._rests_until_s = 0.0
        self._link = link

    @property
    def link(self) -> Link[CallT, AnswerT] | None:
        """The worker if it may be called now."""
        link = self._link
        if link is None or time.monotonic() < self._rests_until_s or not self._has_answered(link):
            return None
        return link

    def answer(self, link: Link[CallT, AnswerT], reply: Reply[AnswerT]) -> AnswerT | None:
        """Wait for `reply` at most the timeout; None, and a note of what is wrong, where it does not come."""
        try:
            return reply.result(self._timeout_s)
        except TimeoutError:
            if self._link is link:
                log.warning("%s %s: no answer in %.1f s", self._role, link.incarnation, self._timeout_s)
                self._late = reply
        except WorkerFailedError as error:
            log.warning("%s %s failed: %s", self._role, link.incarnation, error)
            self._rests_until_s = time.monotonic() + _REST_AFTER_FAILURE_S
        except WorkerLostError:
            self._lose(link)
        return None

    def _has_answered(self, link: Link[CallT, AnswerT]) -> bool:
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
            log.warning("%s %s failed late: %s", self._role, link.incarnation, error)
        self._late = None
        return True

    def _lose(self, link: Link[CallT, AnswerT]) -> None:
        if self._link is link:
            log.warning("%s %s is gone", self._role, link.incarnation)
            self._link = None
            self._on_lost()
