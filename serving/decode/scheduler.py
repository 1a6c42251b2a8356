"""Continuous batching: who is in the batch, and one step of it. No thread and no clock policy here.

A step: admit -> take the drafts that were started -> verify -> clip and commit -> stream -> start the next drafts.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from serving.decode.grouping import Grouping
from serving.decode.guard import DraftPolicy
from serving.decode.limits import SchedulerLimits
from serving.decode.round import Settled, ended, settle
from serving.decode.stats import EngineStats
from serving.decode.text import NUM_BEFORE, TextStream
from serving.decode.timing import RequestLog
from serving.protocols import Drafter, DraftRequest, Outcome, PendingDrafts, Proposal, Verifier
from serving.requests import Chunk, GenerationRequest, Receipt
from serving.rules.book import RuleBook
from serving.session import Session
from serving.types import EMPTY_DRAFT, Draft, DraftLimits, FinishReason, Verified

Sink = Callable[[Chunk], None]
Decode = Callable[[Sequence[int]], str]


@dataclass
class _Running:
    session: Session
    text: TextStream
    sink: Sink
    is_prefilled: bool = False


@dataclass(frozen=True)
class _Waiting:
    request: GenerationRequest
    sink: Sink


@dataclass(frozen=True)
class _Flight:
    """Sessions whose drafts are under way; the loop was held up for `asking_s` to ask for them."""

    session_ids: list[str]
    pending: PendingDrafts
    started_s: float
    asking_s: float


@dataclass
class _Drafted:
    """The drafts of one step, by session, and how long the loop was held up for them."""

    drafts: dict[str, Draft]
    seconds: float = 0.0


class Scheduler:
    """Owns every session. Call from one thread."""

    def __init__(
        self,
        *,
        verifier: Verifier,
        drafter: Drafter,
        decode: Decode,
        limits: SchedulerLimits,
        grouping: Grouping,
        policy: DraftPolicy,
        rules: RuleBook | None = None,
    ) -> None:
        self._verifier = verifier
        self._rules = rules or RuleBook()
        self._drafter = drafter
        self._decode = decode
        self._limits = limits
        self._grouping = grouping
        self._policy = policy
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._running: dict[str, _Running] = {}
        self._flights: deque[_Flight] = deque()
        self.stats = EngineStats(draft_limit=float(limits.max_draft))
        self.log = RequestLog(self.stats)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def degraded(self) -> bool:
        return self._drafter.degraded or self._verifier.degraded

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Queue a request that `limits.check` has passed."""
        self._waiting.setdefault(request.salt, deque()).append(_Waiting(request, sink))

    def cancel(self, request_id: str) -> None:
        """Drop a request wherever it is; its rows are free at once. Unknown ids are ignored: it may just have ended."""
        if request_id in self._running:
            self._end(request_id, "cancelled")
            return
        for salt, queue in list(self._waiting.items()):
            for waiting in [w for w in queue if w.request.request_id == request_id]:
                queue.remove(waiting)
                self.stats.cancelled += 1
                request = waiting.request
                waiting.sink(ended(request_id, request.receipt or Receipt(), request.ledger, "cancelled"))
            if not queue:
                del self._waiting[salt]

    def fail_all(self, error: str) -> None:
        """End every running request with `error`: what is left to do when a whole pass failed."""
        for request_id in list(self._running):
            self._end(request_id, "error", error)
        self._flights.clear()

    def step(self) -> bool:
        """One round for one group of the batch. Whether any of it was settled: a pass may read prompts only."""
        self._admit()
        batch, drafted = self._take_flights()
        if not batch:
            return False
        proposals = [
            Proposal(
                run.session, drafted.drafts.get(run.session.request_id, EMPTY_DRAFT).clipped(run.session.draft_room)
            )
            for run in batch
        ]
        feeds_prompts = not all(run.is_prefilled for run in batch)
        settled = self._settle(batch, proposals, self._verify(proposals, drafted, feeds_prompts=feeds_prompts), drafted)
        for run, outcome in settled:
            self._hand_on(run, outcome.chunk)
        self._start_drafts([run for run in batch if not run.session.is_finished])
        return bool(settled)

    def _hand_on(self, run: _Running, chunk: Chunk) -> None:
        """Stream a chunk. A session that has ended is let go of first: its place is free when its client hears."""
        try:
            if run.session.is_finished:
                self.stats.finished += 1
                self._release(run.session, remember=True)
        finally:
            run.sink(chunk)

    def _verify(self, proposals: list[Proposal], drafted: _Drafted, *, feeds_prompts: bool) -> list[Verified | None]:
        started = time.perf_counter()
        verified = self._verifier.verify(proposals)
        elapsed = time.perf_counter() - started
        self._policy.record_drafts(drafted.drafts, drafted.seconds)
        if not feeds_prompts:
            self._grouping.record(len(proposals), verify_s=elapsed)
            self._policy.record_pass(rows=sum(len(proposal.draft) + 1 for proposal in proposals), verify_s=elapsed)
        self.stats.verify_s += elapsed
        self.stats.rounds += 1
        self.stats.forwards, self.stats.forward_s = self._verifier.passes.count, self._verifier.passes.seconds
        return verified

    def _settle(
        self, batch: list[_Running], proposals: list[Proposal], verified: list[Verified | None], drafted: _Drafted
    ) -> list[tuple[_Running, Settled]]:
        settled: list[tuple[_Running, Settled]] = []
        outcomes: list[Outcome] = []
        for run, proposal, result in zip(batch, proposals, verified, strict=True):
            if result is None:
                continue
            run.is_prefilled = True
            session_id = run.session.request_id
            done = settle(proposal, result, run.text, degraded=self.degraded)
            self.stats.count_draft(proposal.draft, num_accepted=done.num_accepted, num_emitted=len(done.chunk.ids))
            self.stats.count_mismatches(result, done.emitted, is_greedy=run.session.sampling.is_greedy)
            self.stats.count_tiers(done.tiers)
            settled.append((run, done))
            if session_id in drafted.drafts:
                outcomes.append(Outcome(session_id, proposal.draft, done.num_accepted))
                self._policy.observe(session_id, len(batch), proposal.draft, done.num_gained)
        if outcomes:
            self._drafter.observe(outcomes)
        return settled

    def _admit(self) -> None:
        """Tenants in turn, each first come first served."""
        while self._waiting and self.num_running < self._limits.max_sessions:
            salt = next(iter(self._waiting))
            queue = self._waiting.pop(salt)
            waiting = queue.popleft()
            if queue:
                self._waiting[salt] = queue
            self._open(waiting)

    def _open(self, waiting: _Waiting) -> None:
        request = waiting.request
        self.log.admit(request.request_id)
        self.stats.prompt_tokens += 0 if request.is_resumed else len(request.prompt_ids)
        terms = self._rules.open(request)
        session = Session.admit(replace(request, receipt=terms.receipt), terms.rule, max_draft=self._limits.max_draft)
        before = request.prompt_ids[-NUM_BEFORE:].tolist() if request.continues_prompt else ()
        text = TextStream(self._decode, request.limits.stop_strings, before=before)
        for token in request.resume_ids.tolist():
            text.push(token, may_end=False)  # or it would have ended there
        text.take()  # already delivered by the replica that died
        # Known before any role is: should one fail to open, the request ends with an error and is not lost.
        self._running[request.request_id] = _Running(session, text, waiting.sink)
        num_cached = self._verifier.open(session)
        session.receipt = replace(session.receipt, cached_tokens=min(num_cached, session.prompt_len))

    def _take_flights(self) -> tuple[list[_Running], _Drafted]:
        """The batch of this step: the oldest flight when groups take turns, else everyone, and their drafts."""
        in_turns = len(self._flights) > 1 and self._grouping.num_groups(self.num_running) == 2
        flights = [self._flights.popleft()] if in_turns else list(self._flights)
        if not in_turns:
            self._flights.clear()
        drafted = _Drafted({})
        for flight in flights:
            waited = time.perf_counter()
            found = flight.pending.result()
            now = time.perf_counter()
            drafted.seconds += flight.asking_s + now - waited
            self.stats.draft_wait_s += now - waited
            self._grouping.record(len(flight.session_ids), draft_s=now - flight.started_s)
            drafted.drafts.update(zip(flight.session_ids, found, strict=True))
        elsewhere = {session_id for flight in self._flights for session_id in flight.session_ids}
        return [run for key, run in self._running.items() if key not in elsewhere], drafted

    def _start_drafts(self, batch: list[_Running]) -> None:
        ready = [run for run in batch if run.is_prefilled and run.session.draft_room > 0]
        limits = {
            session.request_id: self._policy.limits(
                session.request_id, len(batch), len(session.tokens), is_greedy=session.sampling.is_greedy
            )
            for session in (run.session for run in ready)
        }
        if limits:
            self.stats.draft_limit = sum(limit.most for limit in limits.values()) / len(limits)
        asking = [run for run in ready if limits[run.session.request_id].most > 0]
        if not asking:
            return
        num_groups = 1 if self._flights else self._grouping.num_groups(len(asking))
        for start in range(num_groups):
            requests = [
                self._draft_request(run.session, limits[run.session.request_id]) for run in asking[start::num_groups]
            ]
            started = time.perf_counter()
            pending = self._drafter.start(requests)
            asking_s = time.perf_counter() - started
            self.stats.draft_wait_s += asking_s
            self._flights.append(_Flight([r.session_id for r in requests], pending, started, asking_s))

    @staticmethod
    def _draft_request(session: Session, limits: DraftLimits) -> DraftRequest:
        return DraftRequest(
            session_id=session.request_id,
            ids=session.tokens,
            prompt_len=session.prompt_len,
            max_draft=min(session.draft_room, limits.most),
            salt=session.salt,
            sampling=session.sampling,
            max_by_source=limits,
        )

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        run = self._running[request_id]
        self.stats.cancelled += reason == "cancelled"
        self.stats.failed += reason == "error"
        try:
            self._release(run.session, remember=False)
        finally:  # its client hears of the end even where a role cannot let go of it
            run.sink(ended(request_id, run.session.receipt, run.session.ledger, reason, error=error))

    def _release(self, session: Session, *, remember: bool) -> None:
        del self._running[session.request_id]
        self._policy.forget(session.request_id)
        self._rules.close(session.request_id)
        self._verifier.close(session.request_id)
        self._drafter.close(session.request_id, session.tokens if remember else None)
