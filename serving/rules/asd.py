"""ASD (arXiv 2608.03447): mismatches of small regret are accepted while a request's budget lasts."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from serving.rules.budget import Purse, held
from serving.types import Ledger, ScoreTable, Verdict

Weighting = Literal["remaining", "normalised"]


@dataclass(frozen=True, slots=True)
class AsdRule:
    """Accept a mismatch iff g > 0, r / q <= g and the purse affords it; exact tokens are free, also behind one.

    q of token i of K is what the acceptance may save: K - i + 1, at most `q_cap` (without the cap, long drafts would
    void the gate), or that divided by K. No token of `held_ids` is ever accepted as an exception.
    """

    purse: Purse
    gate: float
    q: Weighting
    q_cap: int
    held_ids: frozenset[int] = frozenset()

    @property
    def is_lossless(self) -> bool:
        return self.purse.is_empty or self.gate <= 0.0

    def judge(self, scores: ScoreTable, ledger: Ledger) -> Verdict:
        return self.purse.spend(scores, ledger, self.wanted(scores))

    def wanted(self, scores: ScoreTable) -> npt.NDArray[np.bool_]:
        """bool[K]: the mismatches that pass the gate, whatever the ledger says."""
        if self.gate <= 0.0:
            return np.zeros(len(scores.draft_ids), dtype=np.bool_)
        regret = scores.regret
        passes = np.isfinite(regret) & (regret / weights(len(regret), self.q, self.q_cap) <= self.gate)
        wanted = scores.mismatch & passes
        return wanted & ~held(scores.draft_ids, self.held_ids) if wanted.any() else wanted

    def learn(self, emitted: Verdict) -> None:
        """Nothing: what this rule does depends on the ledger alone."""


@lru_cache
def weights(size: int, q: Weighting, q_cap: int) -> npt.NDArray[np.float64]:
    """q of each of `size` = K drafted tokens; read only, for it is kept."""
    remaining = np.arange(size, 0, -1, dtype=np.float64)
    found = np.minimum(remaining / max(1, size) if q == "normalised" else remaining, q_cap)
    found.flags.writeable = False
    return found
