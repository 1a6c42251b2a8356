"""What a request may still spend: the part of ASD (arXiv 2608.03447) that every rule with a ledger shares."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from serving.rules.prefix import accept_prefix
from serving.types import Ledger, ScoreTable, Verdict


@dataclass(frozen=True, slots=True)
class Purse:
    """B nats of regret for a whole request, and at most M exceptions in one block."""

    budget: float
    max_exceptions: int

    @property
    def is_empty(self) -> bool:
        """Nothing can ever be accepted that the target would not emit."""
        return self.budget <= 0.0 or self.max_exceptions == 0

    def spend(
        self, scores: ScoreTable, ledger: Ledger, wanted: npt.NDArray[np.bool_], counts: Sequence[int] | None = None
    ) -> Verdict:
        """Accept mismatches in `wanted` (bool[K]) while the ledger affords them: run < B, run + r <= B, fewer than M.

        One float64 running sum begins at the ledger and adds regrets in order, as `Ledger.charge` does, so both
        agree to the last bit. A purse that was empty from the start is strict, and never exhausted.
        """
        mismatch = scores.mismatch
        if self.is_empty or not wanted.any():
            return accept_prefix(scores, ~mismatch, counts=counts)
        run = np.cumsum(np.concatenate(([ledger.regret_spent], np.where(mismatch, scores.regret, 0.0))))
        within = (run[:-1] < self.budget) & (run[1:] <= self.budget)
        open_to = wanted & (np.cumsum(mismatch) <= self.max_exceptions)
        verdict = accept_prefix(scores, ~mismatch | (open_to & within), counts=counts)
        at = verdict.num_accepted
        is_exhausted = verdict.rejected is not None and bool(open_to[at] and not within[at])
        return replace(verdict, is_exhausted=True) if is_exhausted else verdict


def held(ids: npt.NDArray[np.int32], held_ids: frozenset[int]) -> npt.NDArray[np.bool_]:
    """bool[K]: which tokens may be no part of an exception."""
    return np.fromiter((token in held_ids for token in ids.tolist()), dtype=np.bool_, count=len(ids))
