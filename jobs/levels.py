"""What a load test concludes: one row a level of concurrency, and what the way over HTTP costs at it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from jobs.figures import Cell, Spread, accepted_length
from jobs.load import LevelRun, Sample


@dataclass(frozen=True)
class RawRequest:
    """One request as it is kept in the report."""

    prompt_id: str
    tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    latency_s: float | None
    error: str | None

    @classmethod
    def of(cls, sample: Sample) -> "RawRequest":
        timing = sample.timing
        return cls(sample.prompt_id, timing.tokens, _ms(timing.first_s), timing.tpot_ms, timing.last_s, sample.error)


@dataclass(frozen=True)
class Turn:
    """The same requests once over HTTP and once by the engine in this process: median TPOT of each, in milliseconds."""

    http_ms: float
    engine_ms: float

    @property
    def hop_cost(self) -> float:
        """(TPOT over HTTP - TPOT in process) / TPOT over HTTP."""
        return (self.http_ms - self.engine_ms) / self.http_ms


@dataclass(frozen=True)
class Level:
    """One level; spreads are over its answers. `hop_cost` is the median share of TPOT that the way over HTTP takes.

    `turns` are the median TPOT in milliseconds of each turn's requests, over HTTP and in this process.
    """

    concurrency: int
    requests: int
    tokens_per_s: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    latency_s: Spread | None
    accepted_length: float | None
    hop_cost: float | None
    errors: int
    raw: Sequence[RawRequest]
    turns: Sequence[Turn]

    @property
    def first_error(self) -> str | None:
        return next((one.error for one in self.raw if one.error is not None), None)

    @property
    def row(self) -> dict[str, Cell]:
        """What the table shows of it."""
        spreads = {"TTFT ms": self.ttft_ms, "TPOT ms": self.tpot_ms, "latency s": self.latency_s}
        cells: dict[str, Cell] = {"concurrency": self.concurrency, "requests": self.requests}
        cells["tokens/s"] = self.tokens_per_s
        for name, spread in spreads.items():
            cells[f"{name} p50"], cells[f"{name} p95"] = (spread.p50, spread.p95) if spread else (None, None)
        return cells | {
            "accepted length": self.accepted_length,
            "hop cost": None if self.hop_cost is None else f"{self.hop_cost:.1%}",
            "errors": self.errors,
        }


def turn_of(run: LevelRun, engine_tpot_ms: Sequence[float | None]) -> Turn | None:
    """None where either side has no answer of two tokens or more, or they came all at once."""
    sides = (
        Spread.of(sample.timing.tpot_ms for sample in run.samples if sample.error is None),
        Spread.of(engine_tpot_ms),
    )
    if any(side is None or side.p50 <= 0.0 for side in sides):
        return None
    return Turn(*(side.p50 for side in sides if side is not None))


def summarise(run: LevelRun, turns: Sequence[Turn] = ()) -> Level:
    """The figures of one level; failed requests count as errors and nowhere else."""
    answers = [sample for sample in run.samples if sample.error is None]
    return Level(
        concurrency=run.concurrency,
        requests=len(run.samples),
        tokens_per_s=round(sum(sample.timing.tokens for sample in answers) / run.seconds, 2),
        ttft_ms=Spread.of(_ms(one.timing.first_s) for one in answers),
        tpot_ms=Spread.of(sample.timing.tpot_ms for sample in answers),
        latency_s=Spread.of(sample.timing.last_s for sample in answers),
        accepted_length=_accepted_length(answers),
        hop_cost=round(statistics.median(turn.hop_cost for turn in turns), 4) if turns else None,
        errors=len(run.samples) - len(answers),
        raw=[RawRequest.of(sample) for sample in run.samples],
        turns=turns,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000.0 * seconds


def _accepted_length(answers: Sequence[Sample]) -> float | None:
    counts = [sample.counts for sample in answers if sample.counts is not None]
    if not counts:
        return None
    return accepted_length(
        accepted=sum(one.accepted for one in counts),
        rounds=sum(one.rounds for one in counts),
        drafts_empty=sum(one.drafts_empty for one in counts),
    )
