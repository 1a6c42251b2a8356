"""Strict: a draft token is accepted iff it is the token the target emits there. Lossless, greedy or sampled."""

from serving.rules.prefix import accept_prefix
from serving.types import Ledger, ScoreTable, Verdict


class StrictRule:
    """The baseline every lossy rule must equal when its budget is zero."""

    is_lossless = True

    def judge(self, scores: ScoreTable, ledger: Ledger) -> Verdict:
        return accept_prefix(scores, ~scores.mismatch)

    def learn(self, emitted: Verdict) -> None:
        """Nothing to learn."""
