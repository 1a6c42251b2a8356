"""Who drafts: the cache, or the model. Whatever is chosen, the target's text stays the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Literal, NamedTuple, Protocol

from serving.drafters.yield_features import History, Position
from serving.memory.lookup import SuffixMatch


class Choice(NamedTuple):  # made in every round, and the cheapest there is
    """A cache draft (not empty) that is offered in place of the model's.

    `num_rows` of its tokens would be scored; for `model_rate` and `row_price` see DraftLimits.
    """

    session_id: str
    match: SuffixMatch
    position: Position
    history: History
    num_rows: int = 0
    model_rate: float = 1.0
    row_price: float = 0.0

    @property
    def least_yield(self) -> float:
        """Tokens of the draft that must be accepted for it to emit as many in its time as the model's would."""
        return max(0.0, max(1.0, self.model_rate) * (1.0 + self.num_rows * self.row_price) - 1.0)


class Chooser(Protocol):
    """Decides for a whole batch."""

    def takes_cache(self, choices: Sequence[Choice]) -> list[bool]:
        """True where the cache's draft is taken, False where the model drafts."""
        ...


class Predictor(Protocol):
    """Expected accepted tokens of cache drafts, one number each; may be wrong in any way."""

    def predict(self, choices: Sequence[Choice]) -> list[float]: ...


@dataclass(frozen=True)
class RuleChooser:
    """The rule hybrid: the cache where the sum of its path probabilities reaches `least_score`."""

    least_score: float

    def takes_cache(self, choices: Sequence[Choice]) -> list[bool]:
        return [choice.match.score >= self.least_score for choice in choices]


@dataclass(frozen=True)
class YieldChooser:
    """HVD: the cache where its predicted yield exceeds `threshold` tokens; +inf is model-only, -inf cache-only.

    A `measured` threshold is each draft's own `least_yield`.
    A prediction is clamped to [0, K]. Where it is no number the draft's score, which is the cache's own expectation,
    stands in for it.
    """

    predictor: Predictor
    threshold: float | Literal["measured"]

    def takes_cache(self, choices: Sequence[Choice]) -> list[bool]:
        found = zip(choices, self.yields(choices), strict=True)
        if self.threshold == "measured":  # of the tokens that it counts the cost of
            return [min(predicted, one.num_rows) > one.least_yield for one, predicted in found]
        return [predicted > self.threshold for _, predicted in found]

    def yields(self, choices: Sequence[Choice]) -> list[float]:
        """One a choice, within 0..K."""
        if not choices:
            return []
        return [
            _within_draft(predicted, one.match)
            for predicted, one in zip(self.predictor.predict(choices), choices, strict=True)
        ]


def _within_draft(predicted: float, match: SuffixMatch) -> float:
    return min(max(match.score if isnan(predicted) else predicted, 0.0), float(len(match)))
