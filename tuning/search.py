"""Mask searches as Ray Tune trials: one question a trial, on an actor that keeps the target loaded from trial to trial.

The search's own log decides what is asked next, so a killed run goes on where it was, whatever Tune remembers.
"""

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from tuning.dimr import Agreement
from tuning.mask_log import MaskSearch
from tuning.mask_space import Question
from tuning.selfgen import Dialogue
from tuning.via import MaskBench, load_target

log = logging.getLogger(__name__)

_METRIC = "cost"


@dataclass(frozen=True)
class BenchRecipe:
    """What an actor needs to judge masks: the target by name, and the texts of each block of rows."""

    model: str
    dtype: str
    blocks: Sequence[Sequence[Dialogue]]

    def make(self) -> list[MaskBench]:
        """One a block, on one target."""
        longest = max(len(dialogue.ids) for dialogues in self.blocks for dialogue in dialogues)
        target = load_target(self.model, dtype=self.dtype, max_length=longest)
        return [MaskBench(target, dialogues) for dialogues in self.blocks]


def search_masks(
    search: MaskSearch,
    recipe: BenchRecipe,
    folder: Path,
    *,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    on_mask: Callable[[], None],
) -> None:
    """Run `search` to its end, or until it is hopeless, on the Ray this process is connected to.

    A trial takes `num_cpus` and `num_gpus`, which may be a share of one; without a GPU it sees none. One trial at a
    time: what is asked depends on every answer before. `on_mask` hears of each mask that was judged.
    """
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    trainable = tune.with_resources(
        tune.with_parameters(_MaskTrial, recipe=recipe), trial_resources(num_cpus=num_cpus, num_gpus=num_gpus)
    )
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=_Asking(search, on_mask), num_samples=-1, max_concurrent_trials=1, reuse_actors=True,
            trial_name_creator=_name, trial_dirname_creator=_name,
        ),
        run_config=tune.RunConfig(name="trials", storage_path=str(folder.resolve()), verbose=0),
    )  # fmt: skip
    tuner.fit()


def trial_resources(*, num_cpus: float, num_gpus: float) -> tune.PlacementGroupFactory:
    """One bundle, for the one actor of a trial."""
    bundle = {"CPU": num_cpus, "GPU": num_gpus}
    return tune.PlacementGroupFactory([{name: count for name, count in bundle.items() if count}])


class _MaskTrial(tune.Trainable):
    """Judges config["skipped"] on block config["block"] in one step; reused, so the target is loaded once an actor."""

    def setup(self, config: dict[str, Any], recipe: BenchRecipe) -> None:  # type: ignore[override]
        self._benches = recipe.make()
        self._question = _question(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._question = _question(new_config)
        return True

    def step(self) -> dict[str, Any]:
        found = self._benches[self._question.block].agreement(self._question.mask)
        return {**asdict(found), "done": True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing to keep: the search has its own log."""

    def load_checkpoint(self, checkpoint: object) -> None:
        """Nothing was kept."""


class _Asking(Searcher):
    """A MaskSearch as Tune sees it."""

    def __init__(self, search: MaskSearch, on_mask: Callable[[], None]) -> None:
        super().__init__(metric=_METRIC, mode="min")
        self._search = search
        self._on_mask = on_mask
        self._running: dict[str, Question] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Tune keeps a pickle of its settings, which nothing here restores from: a running search is no part of it."""
        return {name: value for name, value in vars(self).items() if name not in ("_search", "_on_mask")}

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Asking":
        return self  # there is one search, whoever copies the settings

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        question = None if self._search.is_hopeless else self._search.ask()
        if question is None:
            return cast("dict[str, Any]", Searcher.FINISHED)  # a string that means the end
        self._running[trial_id] = question
        return {"skipped": list(question.mask), "block": question.block}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """A mask whose cost is no number could not be judged."""
        question = self._running.pop(trial_id)
        if result is None or error or not math.isfinite(result[_METRIC]):
            log.warning("trial %s: %s could not be judged", trial_id, question)
            self._search.fail(question)
            return
        self._search.tell(question, Agreement(result["cost"], result["kl"], result["top1"]))
        self._on_mask()

    def save(self, checkpoint_path: str) -> None:
        """The search's log is the truth, not Tune's checkpoint."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing was saved."""


def _question(config: dict[str, Any]) -> Question:
    return Question(tuple(config["skipped"]), config["block"])


def _name(trial: Trial) -> str:
    return str(trial.trial_id)
