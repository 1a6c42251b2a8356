"""What the cache would have yielded at every position of recorded generations. No model runs.

At position t the cache holds the prompt, the output up to t, and EARLIER generations; the yield is the common prefix
of its draft and the true continuation. Greedy text is the same whatever drafts, so this is exact.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving.drafters.token_kinds import TokenKinds
from serving.drafters.yield_features import FEATURES, History, Position, features
from serving.memory.suffix import SuffixCache
from serving.trace import StepRecord
from serving.types import Floats, Ids, as_ids, common_prefix
from tuning.selfgen import Dialogue

# Rounds between two generations' positions are played by thresholds on the score, so that histories vary.
_THRESHOLDS = (0.0, 2.0, 4.0, 8.0)

Yields = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Replayed:
    """One generation of T output positions. Where the cache finds nothing `lengths` is 0 and the features are zero.

    features f32[T, F]; yields, lengths i32[T], 0 <= yields <= lengths; scores f32[T].
    """

    features: Floats
    yields: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    scores: Floats

    def __len__(self) -> int:
        return len(self.yields)


def replay(
    dialogues: Sequence[Dialogue],
    model_yields: Sequence[Yields],
    new_cache: Callable[[], SuffixCache],
    kinds: TokenKinds,
    *,
    requests_a_cache: int,
) -> Iterator[Replayed]:
    """One a dialogue, in order; after so many requests the cache starts empty, as it does with every tenant.

    `model_yields`, i32[T] a dialogue, are what a model's draft yields at each position: they are history where the
    cache's draft was not taken.
    """
    cache = new_cache()
    for number, (dialogue, yields) in enumerate(zip(dialogues, model_yields, strict=True)):
        if number and number % requests_a_cache == 0:
            cache = new_cache()
        yield _replay_one(dialogue, yields, cache, kinds, threshold=_THRESHOLDS[number % len(_THRESHOLDS)])


def draft_yields(steps: Sequence[StepRecord], output: Ids) -> Yields:
    """i32[T]: how far the draft of each position is right, where each of T rounds emitted one token of `output`."""
    return np.array([common_prefix(as_ids(step.draft_ids), output[t:]) for t, step in enumerate(steps)], np.int32)


def _replay_one(
    dialogue: Dialogue, model_yields: Yields, cache: SuffixCache, kinds: TokenKinds, *, threshold: float
) -> Replayed:
    prompt_len, output = len(dialogue.prompt_ids), dialogue.output_ids
    size = len(output)
    found = Replayed(
        np.zeros((size, len(FEATURES)), dtype=np.float32),
        np.zeros(size, dtype=np.int32),
        np.zeros(size, dtype=np.int32),
        np.zeros(size, dtype=np.float32),
    )
    rounds = _Rounds()
    cache.open("replay", dialogue.prompt_ids)
    for t in range(size):
        match = cache.speculate("replay")
        rounds.settle(t)
        if not match.empty:
            found.lengths[t], found.scores[t] = len(match), match.score
            found.yields[t] = common_prefix(match.ids, output[t:])
            found.features[t] = features(match, Position(prompt_len, t), rounds.history, kinds)
        is_cache = not match.empty and match.score > threshold
        rounds.start(t, num_accepted=int(found.yields[t] if is_cache else model_yields[t]), is_cache=is_cache)
        cache.append("replay", output[t : t + 1])
    cache.close("replay", response_start=prompt_len)
    return found


class _Rounds:
    """A history as decoding would have made it: of rounds that are over, never of the one under way."""

    def __init__(self) -> None:
        self.history = History()
        self._end = 0
        self._outcome: tuple[int, bool] | None = None

    def settle(self, t: int) -> None:
        """The round that ends at t, if one does, becomes history."""
        if t == self._end and self._outcome is not None:
            num_accepted, is_cache = self._outcome
            self.history.add(num_accepted, is_cache=is_cache)

    def start(self, t: int, *, num_accepted: int, is_cache: bool) -> None:
        """The round that begins at t, if the one before has ended there."""
        if t == self._end:
            self._outcome = num_accepted, is_cache
            self._end = t + num_accepted + 1


@dataclass(frozen=True)
class Costs:
    """In passes of plain decoding: a drafted token's row, and a draft of the model with `model_draft` tokens."""

    row: float = 0.06
    model: float = 0.5
    model_draft: int = 4

    def of(self, num_drafted: int, *, is_model: bool) -> float:
        """One round."""
        return 1.0 + self.row * num_drafted + self.model * is_model


@dataclass(frozen=True)
class Outcome:
    """What an arm needed for `tokens` tokens: rounds, accepted tokens, cache drafts, cost in plain passes."""

    tokens: int
    rounds: int
    accepted: int
    cache_drafts: int
    cost: float

    @property
    def row(self) -> dict[str, float]:
        return {
            "cycles_per_1k": round(1000 * self.rounds / self.tokens, 1),
            "accepted_length": round(self.accepted / self.rounds, 3),
            "cache_share": round(self.cache_drafts / self.rounds, 3),
            "speed_vs_plain": round(self.tokens / self.cost, 3),
        }


@dataclass(frozen=True)
class Played:
    """A replayed generation with what the predictor says (f32[T]) and what the model's drafts yield (i32[T])."""

    replayed: Replayed
    predicted: Floats
    model_yields: Yields


Arm = Callable[[Played, int], bool]  # (generation, position at which the cache has a draft) -> whether it is taken


def cache_only(played: Played, t: int) -> bool:
    return True


def model_only(played: Played, t: int) -> bool:
    return False


def rule(least_score: float) -> Arm:
    """The cache where its score reaches `least_score`."""
    return lambda played, t: bool(played.replayed.scores[t] >= least_score)


def hvd(threshold: float) -> Arm:
    """The cache where its predicted yield exceeds `threshold`."""
    return lambda played, t: bool(played.predicted[t] > threshold)


def oracle(played: Played, t: int) -> bool:
    """The one that yields more, the cache on ties."""
    return bool(played.replayed.yields[t] >= played.model_yields[t])


def play(generations: Sequence[Played], arm: Arm, costs: Costs, *, has_model: bool = True) -> Outcome:
    """Decode `generations` by `arm`: without `has_model` plain steps stand where the model would draft."""
    tokens = rounds = accepted = cache_drafts = 0
    cost = 0.0
    for played in generations:
        t, size = 0, len(played.replayed)
        while t < size:
            length = int(played.replayed.lengths[t])
            is_cache = length > 0 and arm(played, t)
            is_model = not is_cache and has_model
            yielded = played.replayed.yields[t] if is_cache else played.model_yields[t] if is_model else 0
            kept = min(int(yielded), size - t - 1)
            cost += costs.of(length if is_cache else costs.model_draft * is_model, is_model=is_model)
            rounds, accepted, cache_drafts = rounds + 1, accepted + kept, cache_drafts + is_cache
            t += kept + 1
        tokens += size
    return Outcome(tokens, rounds, accepted, cache_drafts, cost)
