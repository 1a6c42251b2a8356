"""Who drafts: the cache, or the model. Whatever is chosen, the target's text stays the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Protocol

from serving.drafters.token_kinds import TokenKinds
from serving.drafters.yield_features import History, Position, features
from serving.memory.suffix import SuffixMatch


@dataclass(frozen=True, slots=True)
class Choice:
    """A cache draft (not empty) that is offered in place of the model's."""

    session_id: str
    match: SuffixMatch
    position: Position
    history: History


class Chooser(Protocol):
    """Decides for a whole batch."""

    def takes_cache(self, choices: Sequence[Choice]) -> list[bool]:
        """True where the cache's draft is taken, False where the model drafts."""
        ...


class Predictor(Protocol):
    """Expected accepted tokens of B rows of features, one number a row; may be wrong in any way."""

    def predict(self, rows: Sequence[Sequence[float]]) -> list[float]: ...


@dataclass(frozen=True)
class RuleChooser:
    """The rule hybrid: the cache where the sum of its path probabilities reaches `least_score`."""

    least_score: float

    def takes_cache(self, choices: Sequence[Choice]) -> list[bool]:
        return [choice.match.score >= self.least_score for choice in choices]


@dataclass(frozen=True)
class YieldChooser:
    """HVD: the cache where its predicted yield exceeds `threshold` tokens; +inf is model-only, -inf cache-only.

    A prediction is clamped to [0, K]. Where it is no number the draft's score, which is the cache's own expectation,
    stands in for it.
    """

    predictor: Predictor
    kinds: TokenKinds
    threshold: float

    def takes_cache(self, choices: Sequence[Choice]) -> list[bool]:
        return [predicted > self.threshold for predicted in self.yields(choices)]

    def yields(self, choices: Sequence[Choice]) -> list[float]:
        """One a choice, within 0..K."""
        if not choices:
            return []
        rows = [features(one.match, one.position, one.history, self.kinds) for one in choices]
        return [
            _within_draft(predicted, one.match)
            for predicted, one in zip(self.predictor.predict(rows), choices, strict=True)
        ]


def _within_draft(predicted: float, match: SuffixMatch) -> float:
    return min(max(match.score if isnan(predicted) else predicted, 0.0), float(len(match)))
