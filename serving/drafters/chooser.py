"""Who drafts: the cache, or the model. Whatever is chosen, the target's text stays the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from serving.drafters.token_kinds import TokenKinds
from serving.drafters.yield_features import History, Position, feature_rows, features
from serving.memory.suffix import SuffixMatch
from serving.types import Floats


@dataclass(frozen=True, slots=True)
class Choice:
    """A cache draft (not empty) that is offered in place of the model's."""

    match: SuffixMatch
    position: Position
    history: History


class Chooser(Protocol):
    """Decides for a whole batch."""

    def takes_cache(self, choices: Sequence[Choice]) -> list[bool]:
        """True where the cache's draft is taken, False where the model drafts."""
        ...


class Predictor(Protocol):
    """f32[B] expected accepted tokens of feature rows f32[B, F]; may be wrong in any way."""

    def predict(self, rows: Floats) -> Floats: ...


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
        if not choices:
            return []
        return [predicted > self.threshold for predicted in self.yields(choices).tolist()]

    def yields(self, choices: Sequence[Choice]) -> Floats:
        """f32[B], each within 0..K."""
        rows = feature_rows([features(one.match, one.position, one.history, self.kinds) for one in choices])
        predicted = self.predictor.predict(rows)
        scores = np.array([one.match.score for one in choices], dtype=np.float32)
        lengths = np.array([len(one.match) for one in choices], dtype=np.float32)
        return np.clip(np.where(np.isnan(predicted), scores, predicted), 0.0, lengths)
