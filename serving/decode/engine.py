"""The engine thread: a scheduler that runs by itself, with a mailbox in front. No event loop, no Ray."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from serving.decode.limits import SchedulerLimits
from serving.decode.scheduler import Scheduler, Sink
from serving.decode.stats import EngineStats
from serving.decode.timing import RequestTimes
from serving.errors import OverloadedError, RequestError
from serving.requests import Chunk, GenerationRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Health:
    """`stalled_s` is the time since the last completed round while work is pending, else 0.

    `failed_rounds` are those that have failed since one settled a token: 0 of an engine that works.
    """

    stalled_s: float
    num_running: int
    num_waiting: int
    degraded: bool
    failed_rounds: int


class Engine:
    """Runs `scheduler` in one thread. Every method may be called from any thread."""

    def __init__(self, scheduler: Scheduler, limits: SchedulerLimits) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._mailbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._outstanding: set[str] = set()
        self._is_stopping = False
        self._last_round_s = time.monotonic()
        self._failed_rounds = 0
        self._thread = threading.Thread(target=self._run, name="drafthouse-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Cancel what is left and end the thread."""
        self._post(self._stop)
        self._thread.join(timeout_s)

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Start generating; `sink` gets each chunk on the engine thread and must not block or raise.

        Raises RequestError for a request that can never fit, OverloadedError when the queue is full.
        """
        self._limits.check(request)
        with self._wake:
            self._reserve(request)
        timed = self._scheduler.log.watch(request, self._tracked(sink))
        self._post(lambda: self._scheduler.submit(request, timed))

    def _reserve(self, request: GenerationRequest) -> None:
        """A place in the batch or the queue. What began elsewhere gets one beyond the limit: its client is reading."""
        limit = self._limits.max_sessions + self._limits.max_queued
        if self._is_stopping:
            raise OverloadedError("this engine is stopping; try again later")
        if len(self._outstanding) >= limit and not len(request.resume_ids):
            raise OverloadedError(f"{len(self._outstanding)} requests are in work or waiting; try again later")
        if request.request_id in self._outstanding:
            raise RequestError("request_id", f"{request.request_id!r} is in work already; use another one")
        if not self._outstanding:
            self._last_round_s = time.monotonic()  # an idle engine has not been stalled all the while
        self._outstanding.add(request.request_id)

    def cancel(self, request_id: str) -> None:
        """Free a request's state in every role before the next round. Unknown or ended ids change nothing."""
        self._post(lambda: self._scheduler.cancel(request_id))

    @property
    def health(self) -> Health:
        scheduler = self._scheduler
        has_work = bool(self._outstanding)
        return Health(
            stalled_s=time.monotonic() - self._last_round_s if has_work else 0.0,
            num_running=scheduler.num_running,
            num_waiting=max(0, len(self._outstanding) - scheduler.num_running),
            degraded=scheduler.degraded,
            failed_rounds=self._failed_rounds,
        )

    @property
    def stats(self) -> EngineStats:
        """A copy."""
        return self._scheduler.stats.copy()

    def drain_times(self) -> list[RequestTimes]:
        """The requests that have ended since the last call."""
        return self._scheduler.log.drain()

    def _tracked(self, sink: Sink) -> Sink:
        def deliver(chunk: Chunk) -> None:
            if chunk.finish_reason is not None:
                with self._wake:
                    self._outstanding.discard(chunk.request_id)
            sink(chunk)

        return deliver

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._mailbox.append(command)
            self._wake.notify()

    def _stop(self) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        while not self._is_stopping:
            with self._wake:
                while not self._mailbox and not self._scheduler.has_work:
                    self._wake.wait()
                if not self._scheduler.has_work:
                    self._last_round_s = time.monotonic()
                commands = [self._mailbox.popleft() for _ in range(len(self._mailbox))]
            for work in (*commands, self._round):
                self._attempt(work)
        for request_id in list(self._outstanding):
            self._scheduler.cancel(request_id)

    def _round(self) -> None:
        """One step of the scheduler, noted."""
        has_settled = None
        try:
            has_settled = self._scheduler.step()
        finally:
            if has_settled is None:
                self._failed_rounds += 1  # before its requests hear of it
        self._last_round_s = time.monotonic()
        if has_settled:
            self._failed_rounds = 0

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do one thing; it may fail without ending the engine or losing what comes behind it."""
        try:
            work()
        except Exception as error:  # the thread's boundary
            log.exception("a round failed; its requests end with an error")
            self._fail_all(f"{type(error).__name__}: {error}")

    def _fail_all(self, error: str) -> None:
        while self._scheduler.num_running:
            try:
                self._scheduler.fail_all(error)
            except Exception:  # the same boundary; the request is out of the batch all the same
                log.exception("a role could not let go of a request")
