"""CSD (arXiv 2604.13634): a mismatch is rescued where its pair is frequent and the draft token nearly as likely."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving.memory.correction import RequestMemory
from serving.rules.budget import held
from serving.rules.prefix import accept_prefix
from serving.types import Ledger, ScoreTable, Verdict


@dataclass(frozen=True, slots=True)
class CsdRule:
    """Accept a mismatch iff its pair was seen more than λ = `count_above` times and r <= -ln τ, τ = `min_ratio`.

    τ bounds each exception, p(draft) >= τ p(target); nothing bounds their sum. Pairs with one of `held_ids`, stops
    and special tokens, are never rescued. λ = ∞ or τ > 1 is strict, λ < 0 the gate alone, τ = 0 the memory alone.
    """

    memory: RequestMemory
    count_above: float
    min_ratio: float
    held_ids: frozenset[int] = frozenset()

    @property
    def is_lossless(self) -> bool:
        return math.isinf(self.count_above) or self.min_ratio > 1.0

    def judge(self, scores: ScoreTable, ledger: Ledger) -> Verdict:
        counts = self.counts(scores)
        return accept_prefix(scores, ~scores.mismatch | self.wanted(scores, counts), counts=counts)

    def counts(self, scores: ScoreTable) -> list[int]:
        """How often each drafted token was met in the target token's place; 0 where they agree."""
        pairs = zip(scores.draft_ids.tolist(), scores.next_ids.tolist(), strict=False)
        return [0 if draft == target else self.memory.count(draft, target) for draft, target in pairs]

    def wanted(self, scores: ScoreTable, counts: Sequence[int]) -> npt.NDArray[np.bool_]:
        """bool[K]: the mismatches that are nominated and pass the gate."""
        limit = -math.log(self.min_ratio) if self.min_ratio > 0.0 else math.inf
        regret = scores.regret
        passes = np.isfinite(regret) & (regret <= limit) & (np.asarray(counts) > self.count_above)
        wanted = scores.mismatch & passes
        if not wanted.any():
            return wanted
        return wanted & ~held(scores.draft_ids, self.held_ids) & ~held(scores.next_ids[:-1], self.held_ids)

    def learn(self, emitted: Verdict) -> None:
        """Each divergence counts once, after it was decided: none nominates itself."""
        self.memory.note(emitted)
