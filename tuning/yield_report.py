"""How good a yield predictor is: precision and recall, calibration, what it looks at, and what it is worth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving.drafters.yield_features import FEATURES
from serving.types import Floats
from tuning.replay import Costs, Outcome, Played, cache_only, hvd, model_only, oracle, play, rule

LONG = 6  # tokens: a draft that yields as many is one to find
THRESHOLDS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_NUM_BINS = 12

Predict = Callable[[Floats], Floats]


@dataclass(frozen=True)
class Accuracy:
    """Of predictions against yields; `precision` and `recall` of finding drafts that yield LONG tokens or more."""

    num_drafts: int
    share_long: float
    precision: float
    recall: float
    mean_squared_error: float
    variance: float

    @classmethod
    def of(cls, predicted: Floats, yields: npt.NDArray[np.int32]) -> "Accuracy":
        said, true = predicted >= LONG, yields >= LONG
        both = float((said & true).sum())
        return cls(
            num_drafts=len(yields),
            share_long=round(float(true.mean()), 4),
            precision=round(both / max(1.0, float(said.sum())), 4),
            recall=round(both / max(1.0, float(true.sum())), 4),
            mean_squared_error=round(float(np.square(predicted - yields).mean()), 4),
            variance=round(float(yields.var()), 4),
        )


def calibration(predicted: Floats, yields: npt.NDArray[np.int32]) -> list[tuple[float, float]]:
    """Pairs of mean prediction and mean yield, of equally many drafts each, by rising prediction."""
    order = np.argsort(predicted)
    return [
        (float(predicted[part].mean()), float(yields[part].mean()))
        for part in np.array_split(order, _NUM_BINS)
        if len(part)
    ]


def importance(predict: Predict, rows: Floats, yields: npt.NDArray[np.int32], *, seed: int = 0) -> dict[str, float]:
    """By how much the squared error grows when one feature's values are shuffled, most important first."""
    rng = np.random.default_rng(seed)
    before = np.square(predict(rows) - yields).mean()
    grown = {}
    for index, name in enumerate(FEATURES):
        shuffled = rows.copy()
        shuffled[:, index] = rng.permutation(shuffled[:, index])
        grown[name] = round(float(np.square(predict(shuffled) - yields).mean() - before), 4)
    return dict(sorted(grown.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Arms:
    """What every way to choose needed on the same generations, and the threshold that needed least."""

    best_threshold: float
    outcomes: dict[str, Outcome]

    @classmethod
    def of(cls, generations: Sequence[Played], costs: Costs) -> "Arms":
        by_threshold = {tau: play(generations, hvd(tau), costs) for tau in THRESHOLDS}
        best = min(by_threshold, key=lambda tau: by_threshold[tau].cost)
        outcomes = {
            "plain": play(generations, model_only, costs, has_model=False),
            "cache only": play(generations, cache_only, costs, has_model=False),
            "model only": play(generations, model_only, costs),
            "cache, else model": play(generations, cache_only, costs),
            "rule hybrid": play(generations, rule(costs.model_draft), costs),
            f"hvd, tau {LONG}": play(generations, hvd(LONG), costs),
            f"hvd, tau {best:g}": by_threshold[best],
            "oracle": play(generations, oracle, costs),
        }
        return cls(best, outcomes)
