"""What a load test concludes: one row a level of concurrency, and what the way over HTTP costs at it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from jobs.figures import Cell, Spread, accepted_length
from jobs.load import LevelRun, Sample
from serving.errors import ConfigError, one_line


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
class Level:
    """One level; spreads are over its answers, `hop_cost` is a share of the median TPOT, None without a baseline."""

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


def summarise(run: LevelRun, in_process: "Baseline | None" = None) -> Level:
    """The figures of one level; failed requests count as errors and nowhere else."""
    answers = [sample for sample in run.samples if sample.error is None]
    tpot_ms = Spread.of(sample.timing.tpot_ms for sample in answers)
    is_matched = in_process is not None and in_process.batch == run.concurrency
    return Level(
        concurrency=run.concurrency,
        requests=len(run.samples),
        tokens_per_s=round(sum(sample.timing.tokens for sample in answers) / run.seconds, 2),
        ttft_ms=Spread.of(_ms(one.timing.first_s) for one in answers),
        tpot_ms=tpot_ms,
        latency_s=Spread.of(sample.timing.last_s for sample in answers),
        accepted_length=_accepted_length(answers),
        hop_cost=in_process.hop_cost(tpot_ms.p50) if in_process and is_matched and tpot_ms else None,
        errors=len(run.samples) - len(answers),
        raw=[RawRequest.of(sample) for sample in run.samples],
    )


@dataclass(frozen=True)
class Baseline:
    """One run of an in-process report: its batch size and median TPOT."""

    name: str
    batch: int
    tpot_ms: float

    def hop_cost(self, tpot_ms: float) -> float:
        """(TPOT over HTTP - TPOT in process) / TPOT over HTTP."""
        return round((tpot_ms - self.tpot_ms) / tpot_ms, 4)


class _Meta(BaseModel):
    batch: int


class _Spread(BaseModel):
    p50: float


class _Run(BaseModel):
    name: str
    tpot_ms: _Spread | None


class _Report(BaseModel):
    meta: _Meta
    runs: list[_Run]


def read_baseline(path: Path, name: str) -> Baseline:
    """The run `name` of an in-process report. Raises ConfigError naming the flag."""
    try:
        report = _Report.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--against: {path} cannot be read: {error.strerror}") from None
    except (ValidationError, UnicodeDecodeError) as error:
        reason = one_line(error) if isinstance(error, ValidationError) else "no UTF-8 text"
        raise ConfigError(f"--against: {path} is no report of an in-process bench: {reason}") from None
    for run in report.runs:
        if run.name == name:
            if run.tpot_ms is None:
                raise ConfigError(f"--against: run {name!r} of {path} has no time per token; measure longer answers")
            return Baseline(name, report.meta.batch, run.tpot_ms.p50)
    names = ", ".join(run.name for run in report.runs)
    raise ConfigError(f"--against-name: {path} has no run {name!r}; it has {names}")


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
