"""Ways to search for the layers that a target can do without. No model here: masks go out, costs come in.

Each is a generator that yields at most `budget` questions and is sent the cost of each, lower is better. First and last
layer are always kept. The same seed and the same costs give the same questions.
"""

from collections.abc import Callable, Generator

import numpy as np
import optuna

from tuning.mask_space import Asking, Mask, Question, Space
from tuning.swaps import swapped


def even(space: Space, budget: int, seed: int) -> Asking:
    """One mask: layers at equal distances; where most are skipped, those that are kept."""
    num_kept = len(space.candidates) - space.num_skipped
    if space.num_skipped <= num_kept:
        yield Question(_spaced(space, space.num_skipped))
    else:
        kept = _spaced(space, num_kept)
        yield Question(tuple(layer for layer in space.candidates if layer not in kept))


def one_at_a_time(space: Space, budget: int, seed: int) -> Asking:
    """The layers that do least harm when each is skipped alone: one mask a layer, then the set of the best."""
    harm = yield from _sensitivities(space)
    yield Question(space.top([-cost for cost in harm]))


def random_search(space: Space, budget: int, seed: int) -> Asking:
    """Masks drawn at random."""
    rng = np.random.default_rng((seed, space.num_skipped))
    for _ in range(budget):
        yield Question(space.drawn(rng))


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
    """Sensitivities, TPE that starts from their ranks, then the swaps that a model of all costs suggests.

    What it judges again, on further rows, is part of its budget.
    """
    rng = np.random.default_rng((seed, space.num_skipped))
    harm = yield from _sensitivities(space)
    left = budget - len(harm)
    study = _study(seed)
    ranks = np.argsort(np.argsort([-cost for cost in harm])) / max(1, len(harm) - 1)
    answers: dict[Question, float] = {}
    num_sampled = max(1, left // 3)
    for number in range(num_sampled):
        if number % 2 == 0:  # the order of the ranks, more and more disturbed
            keys = np.clip(ranks + rng.normal(0.0, 0.02 * number, len(ranks)), 0.0, 1.0)
            study.enqueue_trial({_key(layer): float(key) for layer, key in zip(space.candidates, keys, strict=True)})
        mask, cost = yield from _asked(study, space)
        answers[Question(mask)] = cost
    yield from swapped(space, answers, left - num_sampled)


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


def _sensitivities(space: Space) -> Generator[Question, float, list[float]]:
    """The cost of skipping each candidate alone."""
    harm = []
    for layer in space.candidates:
        harm.append((yield Question((layer,))))
    return harm


def _study(seed: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))


def _asked(study: optuna.Study, space: Space) -> Generator[Question, float, tuple[Mask, float]]:
    trial = study.ask()
    mask = space.top([trial.suggest_float(_key(layer), 0.0, 1.0) for layer in space.candidates])
    cost = yield Question(mask)
    study.tell(trial, cost)
    return mask, cost


def _key(layer: int) -> str:
    return f"layer {layer}"
