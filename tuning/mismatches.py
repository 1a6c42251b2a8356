"""What ends the blocks of a strict run: the one recording that ASD and CSD are calibrated from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from serving.config_rules import Calibration
from serving.memory.drift import NUM_BINS, bin_of, shares_of
from serving.requests import GenerationRequest
from serving.rules.book import RuleBook, Terms
from serving.session import AcceptanceRule
from serving.types import Ledger, ScoreTable, Verdict


class Mismatch(NamedTuple):
    """A first rejection: K of its block, its place in it from 0, both ids, and its regret in nats."""

    size: int
    place: int
    draft_id: int
    target_id: int
    regret: float


@dataclass
class RecordingRule:
    """`rule`, with its rejections noted once they are emitted."""

    rule: AcceptanceRule
    found: list[Mismatch]
    _size: int = 0

    @property
    def is_lossless(self) -> bool:
        return self.rule.is_lossless

    def judge(self, scores: ScoreTable, ledger: Ledger) -> Verdict:
        self._size = len(scores.draft_ids)
        return self.rule.judge(scores, ledger)

    def learn(self, emitted: Verdict) -> None:
        self.rule.learn(emitted)
        met = emitted.rejected
        if met is not None:
            self.found.append(Mismatch(self._size, met.index, met.draft_id, met.target_id, met.regret))


@dataclass
class RecordingBook(RuleBook):
    """A strict book that keeps what ended each block, by request."""

    found: dict[str, list[Mismatch]] = field(default_factory=dict)

    def open(self, request: GenerationRequest) -> Terms:
        terms = super().open(request)
        return replace(terms, rule=RecordingRule(terms.rule, self.found.setdefault(request.request_id, [])))


def calibration_of(mismatches: Sequence[Mismatch], *, provenance: str) -> Calibration | None:
    """The histogram that served traffic is compared with; None where nothing was ever rejected."""
    counts = [0] * NUM_BINS
    for mismatch in mismatches:
        if math.isfinite(mismatch.regret):
            counts[bin_of(mismatch.regret)] += 1
    if not sum(counts):
        return None
    shares = tuple(round(share, 6) for share in shares_of(counts))
    return Calibration(num_mismatches=sum(counts), shares=shares, provenance=provenance)
