"""From what an engine says of itself, now and then, to what the metrics should show. No Ray."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serving.decode.engine import Health
from serving.decode.stats import EngineStats
from serving.decode.timing import RequestTimes
from serving.deploy import metric_table as m
from serving.deploy.drift_watch import DriftWatch
from serving.deploy.hops import Hops
from serving.deploy.metric_table import Metric
from serving.memory.drift import EDGES

WINDOW_S = 60.0
_UP_TO = (*(str(edge) for edge in EDGES), "inf")
_FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}


@dataclass(frozen=True)
class Reading:
    """One look at an engine; `time_s` is monotonic.

    `hops` are those to a drafter, `slim_hops` those to a slim verifier; `ended` are the requests that ended since the
    last look.
    """

    time_s: float
    health: Health
    stats: EngineStats
    hops: Hops
    queue_limit: int
    slim_hops: Hops = field(default_factory=Hops)
    ended: Sequence[RequestTimes] = ()


class Instruments(Protocol):
    """Where values go: `count` adds to a counter, `set` moves a gauge, `observe` adds to a histogram."""

    def count(self, metric: Metric, value: float, label: str | None = None) -> None: ...

    def set(self, metric: Metric, value: float) -> None: ...

    def observe(self, metric: Metric, value: float, label: str | None = None) -> None: ...


TOTALS: Mapping[Metric, Callable[[EngineStats], float]] = {
    m.NUM_DRAFTS: lambda stats: stats.num_drafts,
    m.NUM_DRAFT_TOKENS: lambda stats: stats.drafted,
    m.NUM_ACCEPTED_TOKENS: lambda stats: stats.accepted,
    m.PROMPT_TOKENS: lambda stats: stats.prompt_tokens,
    m.GENERATION_TOKENS: lambda stats: stats.emitted,
    m.DRAFTS_EMPTY: lambda stats: stats.drafts_empty,
    m.ROUNDS: lambda stats: stats.rounds,
    m.TARGET_PASSES: lambda stats: stats.target_passes,
    m.TARGET_ROWS: lambda stats: stats.target_rows,
    m.REPLACED_TOKENS: lambda stats: stats.replaced,
    m.SLIM_PASSES: lambda stats: stats.slim_passes,
    m.SLIM_ACCEPTED: lambda stats: stats.slim_accepted,
    m.REGENERATED: lambda stats: stats.regenerated,
    m.CANCELLED: lambda stats: stats.cancelled,
    m.FAILED: lambda stats: stats.failed,
}

PROFILE_TOTALS: Mapping[Metric, Callable[[EngineStats], float]] = {
    m.EXCEPTIONS: lambda stats: stats.exceptions,
    m.RESCUES: lambda stats: stats.rescues,
    m.REGRET: lambda stats: stats.regret_spent,
    m.EXHAUSTED: lambda stats: stats.exhausted,
}

LEVELS: Mapping[Metric, Callable[[Reading], float]] = {
    m.NUM_RUNNING: lambda now: now.health.num_running,
    m.NUM_WAITING: lambda now: now.health.num_waiting,
    m.STALLED_S: lambda now: now.health.stalled_s,
    m.DEGRADED: lambda now: float(now.health.degraded),
    m.SPECULATION_K: lambda now: now.stats.draft_limit,
    m.QUEUE_LIMIT: lambda now: now.queue_limit,
}


@dataclass(frozen=True)
class Share:
    """What a window shows: `part` over `whole`, each the growth of a sum, times `scale`."""

    part: Callable[[Reading], float]
    whole: Callable[[Reading], float]
    scale: float = 1.0

    def of(self, before: Reading, now: Reading) -> float:
        """NaN where there was nothing to divide by: a gauge left alone would show its last value for ever."""
        whole = self.whole(now) - self.whole(before)
        return self.scale * (self.part(now) - self.part(before)) / whole if whole > 0 else math.nan


SHARES: Mapping[Metric, Share] = {
    m.ACCEPTANCE_RATE: Share(lambda r: r.stats.accepted, lambda r: r.stats.drafted),
    m.ACCEPTED_LENGTH: Share(lambda r: r.stats.accepted, lambda r: r.stats.num_drafts),
    m.REJECTION_RATE: Share(lambda r: r.stats.replaced, lambda r: r.stats.drafted),
    m.SLIM_SHARE: Share(lambda r: r.stats.slim_accepted + r.stats.regenerated, lambda r: r.stats.emitted),
    m.AUDIT_REGRET: Share(lambda r: r.stats.audit_regret, lambda r: r.stats.audited),
    m.FORWARD_MS: Share(lambda r: r.stats.forward_s, lambda r: r.stats.forwards, 1000.0),
    m.HOP_MS: Share(lambda r: r.hops.hop_s, lambda r: r.hops.num_calls, 1000.0),
    m.SLIM_HOP_MS: Share(lambda r: r.slim_hops.hop_s, lambda r: r.slim_hops.num_calls, 1000.0),
    m.DRAFT_MS: Share(lambda r: r.hops.compute_s, lambda r: r.hops.num_calls, 1000.0),
}

_NOTHING_YET = Reading(float("-inf"), Health(0.0, 0, 0, False, 0), EngineStats(), Hops(), 0)


class Publisher:
    """Passes each reading on to the instruments: sums as their growth, shares over the last WINDOW_S.

    `profile` labels what its rule did; with `calibrated` shares of first mismatches, drift from them is watched.
    """

    def __init__(
        self, instruments: Instruments, *, profile: str = "", calibrated: Sequence[float] | None = None
    ) -> None:
        self._instruments = instruments
        self._profile = profile
        self._drift = None if calibrated is None else DriftWatch(calibrated)
        self._window: deque[Reading] = deque([_NOTHING_YET])

    def publish(self, now: Reading) -> None:
        self._count(self._window[-1].stats, now.stats)
        self._window.append(now)
        while self._window[1].time_s <= now.time_s - WINDOW_S:
            self._window.popleft()
        for metric, level in LEVELS.items():
            self._instruments.set(metric, level(now))
        for metric, share in SHARES.items():
            self._instruments.set(metric, share.of(self._window[0], now))
        drift = None if self._drift is None else self._drift.look(now.stats.first_mismatches)
        if drift is not None:
            self._instruments.set(m.DRIFT, drift)
        for times in now.ended:
            self._observe(times)

    def _count(self, before: EngineStats, now: EngineStats) -> None:
        for metric, total in TOTALS.items():
            self._grow(metric, total(now) - total(before))
        for metric, total in PROFILE_TOTALS.items():
            self._grow(metric, total(now) - total(before), self._profile)
        for edge, old, new in zip(_UP_TO, before.first_mismatches, now.first_mismatches, strict=True):
            self._grow(m.FIRST_MISMATCHES, new - old, edge)
        known = before.accepted_at + [0] * (len(now.accepted_at) - len(before.accepted_at))
        for position, (old, new) in enumerate(zip(known, now.accepted_at, strict=True)):
            self._grow(m.NUM_ACCEPTED_AT, new - old, str(position))

        for source, count in now.drafts_by.items():
            self._grow(m.DRAFTS_BY_SOURCE, count - before.drafts_by.get(source, 0), source)

    def _grow(self, metric: Metric, growth: float, label: str | None = None) -> None:
        if growth > 0:
            self._instruments.count(metric, growth, label)

    def _observe(self, times: RequestTimes) -> None:
        self._instruments.count(m.REQUEST_SUCCESS, 1, _FINISHED_REASONS[times.reason])
        parts = times.first_token_parts
        for part, seconds in parts.items():
            self._instruments.observe(m.FIRST_TOKEN_PART_S, seconds, part)
        if parts:
            self._instruments.observe(m.FIRST_TOKEN_S, sum(parts.values()))
        if times.is_complete:
            self._instruments.observe(m.REQUEST_S, times.latency_s)
            if times.token_s is not None:
                self._instruments.observe(m.TOKEN_S, times.token_s)
