"""Ways to search for the layers that a target can do without. No model here: masks go out, costs come in.

Each is a generator that yields masks (the skipped layers, ascending) and is sent the cost of each, lower is better.
First and last layer are always kept. The same seed and the same costs give the same masks.
"""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import optuna

Mask: TypeAlias = tuple[int, ...]
Asking: TypeAlias = Generator[Mask, float, None]

_PARENTS = 4  # best masks whose neighbours are asked for
_LEAST_COST = 1e-9


@dataclass(frozen=True)
class Space:
    """Masks that skip `num_skipped` of the layers between the first and the last of `num_layers`."""

    num_layers: int
    num_skipped: int

    @property
    def candidates(self) -> range:
        return range(1, self.num_layers - 1)

    def top(self, keys: Iterable[float]) -> Mask:
        """The layers with the highest keys, one a candidate; the lower layer where keys are equal."""
        order = sorted(zip(self.candidates, keys, strict=True), key=lambda pair: (-pair[1], pair[0]))
        return tuple(sorted(layer for layer, _ in order[: self.num_skipped]))

    def drawn(self, rng: np.random.Generator) -> Mask:
        """Any mask, each as likely."""
        picked = rng.choice(list(self.candidates), self.num_skipped, replace=False)
        return tuple(sorted(int(layer) for layer in picked))


def even(space: Space, budget: int, seed: int) -> Asking:
    """One mask: layers at equal distances; where most are skipped, those that are kept."""
    num_kept = len(space.candidates) - space.num_skipped
    if space.num_skipped <= num_kept:
        yield _spaced(space, space.num_skipped)
    else:
        kept = _spaced(space, num_kept)
        yield tuple(layer for layer in space.candidates if layer not in kept)


def one_at_a_time(space: Space, budget: int, seed: int) -> Asking:
    """The layers that do least harm when each is skipped alone: one mask a layer, then the set of the best."""
    harm = yield from _sensitivities(space)
    yield space.top([-cost for cost in harm])


def random_search(space: Space, budget: int, seed: int) -> Asking:
    """Masks drawn at random."""
    rng = np.random.default_rng((seed, space.num_skipped))
    for _ in range(budget):
        yield space.drawn(rng)


def alternating(space: Space, budget: int, seed: int) -> Asking:
    """The paper's: random masks and Bayesian ones (TPE over a key a layer, the highest are skipped) in turn."""
    rng = np.random.default_rng((seed, space.num_skipped))
    study = _study(seed)
    for number in range(budget):
        if number % 2 == 0:
            keys = rng.random(len(space.candidates))
            study.enqueue_trial({_key(layer): float(key) for layer, key in zip(space.candidates, keys, strict=True)})
        yield from _asked(study, space)


def guided(space: Space, budget: int, seed: int) -> Asking:
    """Sensitivities, TPE that starts from their ranks, then the swaps that a model of all costs suggests."""
    rng = np.random.default_rng((seed, space.num_skipped))
    harm = yield from _sensitivities(space)
    left = budget - len(harm)
    study = _study(seed)
    ranks = np.argsort(np.argsort([-cost for cost in harm])) / max(1, len(harm) - 1)
    known: dict[Mask, float] = {}
    num_sampled = max(1, left // 3)
    for number in range(num_sampled):
        if number % 2 == 0:  # the order of the ranks, more and more disturbed
            keys = np.clip(ranks + rng.normal(0.0, 0.02 * number, len(ranks)), 0.0, 1.0)
            study.enqueue_trial({_key(layer): float(key) for layer, key in zip(space.candidates, keys, strict=True)})
        mask, cost = yield from _asked(study, space)
        known[mask] = cost
    yield from _swapped(space, known, left - num_sampled)


ARMS: dict[str, Callable[[Space, int, int], Asking]] = {
    "even": even,
    "one at a time": one_at_a_time,
    "guided": guided,
    "random": random_search,
    "alternating": alternating,
}


def least_budget(arm: str, num_layers: int) -> int:
    """Masks without which `arm` would try none of its size."""
    return num_layers - 1 if ARMS[arm] in (one_at_a_time, guided) else 1  # each candidate alone comes first


def _spaced(space: Space, count: int) -> tuple[int, ...]:
    """`count` candidates, at most half of them, at equal distances."""
    places = np.linspace(space.candidates[0], space.candidates[-1], count + 2)[1:-1]
    return tuple(int(place) for place in np.round(places))


def _sensitivities(space: Space) -> Generator[Mask, float, list[float]]:
    """The cost of skipping each candidate alone."""
    harm = []
    for layer in space.candidates:
        harm.append((yield (layer,)))
    return harm


def _study(seed: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))


def _asked(study: optuna.Study, space: Space) -> Generator[Mask, float, tuple[Mask, float]]:
    trial = study.ask()
    mask = space.top([trial.suggest_float(_key(layer), 0.0, 1.0) for layer in space.candidates])
    cost = yield mask
    study.tell(trial, cost)
    return mask, cost


def _swapped(space: Space, known: dict[Mask, float], budget: int) -> Asking:
    """Local search: of the neighbours of the best masks, the one that all costs so far make most promising."""
    for _ in range(budget):
        best = sorted(known, key=lambda mask: (known[mask], mask))[:_PARENTS]
        fresh = sorted({near for mask in best for near in _neighbours(space, mask)} - known.keys())
        if not fresh:
            return
        asked = fresh[int(np.argmin(_predicted(space, known, fresh)))]
        known[asked] = yield asked


def _neighbours(space: Space, mask: Mask) -> set[Mask]:
    """`mask` with one skipped layer kept and one kept layer skipped."""
    kept = set(space.candidates) - set(mask)
    return {tuple(sorted({*mask, into} - {out})) for out in mask for into in kept}


def _predicted(space: Space, known: dict[Mask, float], asked: Sequence[Mask]) -> npt.NDArray[np.float64]:
    """The log cost of each of `asked` if layers added up: ridge regression on what is known.

    On logs they nearly do: on SmolLM2 the correlation with unseen masks' costs is 0.92 to 0.94 at 4 to 12 layers.
    """
    judged = [mask for mask, cost in known.items() if math.isfinite(cost)]
    logs = np.log([max(known[mask], _LEAST_COST) for mask in judged])
    mean = logs.mean() if judged else 0.0
    design = _indicators(space, judged)
    weights = np.linalg.solve(design.T @ design + np.eye(design.shape[1]), design.T @ (logs - mean))
    predicted: npt.NDArray[np.float64] = _indicators(space, asked) @ weights
    return predicted


def _indicators(space: Space, masks: Sequence[Mask]) -> npt.NDArray[np.float64]:
    """[len(masks), num_layers]: 1 where a mask skips a layer."""
    found = np.zeros((len(masks), space.num_layers))
    for row, mask in zip(found, masks, strict=True):
        row[list(mask)] = 1.0
    return found


def _key(layer: int) -> str:
    return f"layer {layer}"
