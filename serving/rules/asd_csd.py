"""CSD and ASD together: the memory nominates, the ledger pays."""

from dataclasses import dataclass
from typing import Literal

from serving.rules.asd import AsdRule
from serving.rules.csd import CsdRule
from serving.types import Ledger, ScoreTable, Verdict

Combination = Literal["and", "or"]


@dataclass(frozen=True, slots=True)
class AsdCsdRule:
    """`and`: an exception passes the tests of both rules; `or`: those of either. It is charged in any case."""

    asd: AsdRule
    csd: CsdRule
    combine: Combination = "and"

    @property
    def is_lossless(self) -> bool:
        by_rule = (self.asd.gate <= 0.0, self.csd.is_lossless)
        return self.asd.purse.is_empty or (any(by_rule) if self.combine == "and" else all(by_rule))

    def judge(self, scores: ScoreTable, ledger: Ledger) -> Verdict:
        counts = self.csd.counts(scores)
        nominated, gated = self.csd.wanted(scores, counts), self.asd.wanted(scores)
        wanted = nominated & gated if self.combine == "and" else nominated | gated
        return self.asd.purse.spend(scores, ledger, wanted, counts)

    def learn(self, emitted: Verdict) -> None:
        self.csd.learn(emitted)
