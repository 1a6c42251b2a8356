"""What a hybrid profile is compared with: its parts alone, the rule, and the best choice in hindsight.

The oracle is a real run of two passes. The first decodes plainly and has the model draft at every position, so that
the text and what the model yields anywhere are known; in the second the chooser looks both up, and only who is chosen
drafts. Its speed is thus what a perfect predictor that costs nothing would give, under the same guard.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving.build import Built, build
from serving.config import HybridDrafter, NoDrafter, Profile, RuleChooser, YieldChooser
from serving.drafters.chooser import Choice
from serving.errors import ConfigError
from serving.requests import GenerationRequest
from serving.types import Ids, as_ids, common_prefix
from tuning.prompts import Prompt
from tuning.replay import draft_yields
from tuning.traces import TracingBook, capture

ORACLE = "oracle"


def hybrid_parts(profile: Profile) -> tuple[Profile, ...]:
    """Plain, model only, cache only, rule, and `profile` itself as `hvd`. Raises ConfigError for what is no HVD."""
    drafter = _hybrid(profile)
    parts = {
        "plain": NoDrafter(),
        drafter.model.kind: drafter.model,
        drafter.cache.kind: drafter.cache,
        "rule": drafter.model_copy(update={"chooser": RuleChooser()}),
        "hvd": drafter,
    }
    return tuple(profile.model_copy(update={"name": name, "drafter": part}) for name, part in parts.items())


@dataclass(frozen=True)
class Hindsight:
    """One request's own text i32[T], and how many tokens of a model's draft at each position are right, i32[T]."""

    output_ids: Ids
    model_yields: npt.NDArray[np.int32]


class OracleChooser:
    """The source whose whole draft yields more; the cache on ties, which costs less. By number of the request."""

    def __init__(self, known: Sequence[Hindsight]) -> None:
        self._known = known

    def takes_cache(self, choices: Sequence[Choice]) -> list[bool]:
        return [self._takes_cache(choice) for choice in choices]

    def _takes_cache(self, choice: Choice) -> bool:
        number, t = request_number(choice.session_id), choice.position.num_emitted
        if number is None:  # the model is what an engine that is being built measures
            return False
        known = self._known[number]
        return bool(common_prefix(choice.match.ids, known.output_ids[t:]) >= known.model_yields[t])


def request_name(number: int, *, call: int = 0) -> str:
    """The id of a benchmark's request, of its own in each call."""
    return f"{call}-{number}"


def request_number(name: str) -> int | None:
    """What `request_name` was made of; None for a name of another kind."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdigit() else None


def build_oracle(profile: Profile, prompts: Sequence[Prompt], requests: Sequence[GenerationRequest]) -> Built:
    """`profile` with the choices that are best for `requests`, which are those of `prompts`. Runs the first pass."""
    drafter, book = _hybrid(profile), TracingBook(every_position=True)
    unguarded = profile.engine.model_copy(update={"guard": False})
    model_only = profile.model_copy(update={"drafter": drafter.model, "engine": unguarded})
    known = hindsight(build(model_only, rules=book), book, prompts, requests)
    return build(profile.model_copy(update={"name": ORACLE}), chooser=OracleChooser(known))


def hindsight(
    built: Built, book: TracingBook, prompts: Sequence[Prompt], requests: Sequence[GenerationRequest]
) -> list[Hindsight]:
    """Of each of `requests`, in order. `built` drafts with the model alone and judges by `book`, at every position."""
    found = []
    for steps in capture(built, book, prompts, requests):
        output = as_ids([token for step in steps for token in step.emitted_ids])
        found.append(Hindsight(output, draft_yields(steps, output)))
    return found


def _hybrid(profile: Profile) -> HybridDrafter:
    drafter = profile.drafter
    if not isinstance(drafter, HybridDrafter) or not isinstance(drafter.chooser, YieldChooser):
        raise ConfigError(f"--hybrid: {profile.name!r} must draft by kind hybrid with a chooser of kind yield")
    return drafter
