"""A mask search as Ray Tune sees it: trials that fail are asked again once, and a search that only fails ends."""

from pathlib import Path

from ray.tune.search import Searcher

from tuning.mask_log import MaskLog, MaskSearch, Plan
from tuning.search import _Asking, trial_resources

JUDGED = {"cost": 0.5, "kl": 0.25, "top1": 0.75}


def asking(folder: Path) -> tuple[_Asking, MaskLog, list[None]]:
    log, heard = MaskLog(folder / "log.jsonl", "toy"), []
    search = MaskSearch(Plan(num_layers=12, sizes=[4], budget=20, seed=0, arms=("random",)), log)
    return _Asking(search, lambda: heard.append(None)), log, heard


def test_a_trial_whose_actor_died_is_asked_again_under_another_name(tmp_path: Path) -> None:
    tune, log, heard = asking(tmp_path)
    first = tune.suggest("one")
    tune.on_trial_complete("one", error=True)
    assert tune.suggest("two") == first
    tune.on_trial_complete("two", JUDGED)
    assert (len(log), len(heard)) == (1, 1)
    assert tune.suggest("three") != first


def test_a_cost_that_is_no_number_is_no_cost(tmp_path: Path) -> None:
    tune, log, heard = asking(tmp_path)
    for name in ("one", "two"):
        tune.suggest(name)
        tune.on_trial_complete(name, JUDGED | {"cost": float("nan")})
    assert (len(log), log.num_evaluated, heard) == (0, 1, [])


def test_trials_that_all_fail_end_the_search(tmp_path: Path) -> None:
    tune, _, _ = asking(tmp_path)
    names = iter(range(100))
    while (config := tune.suggest(name := str(next(names)))) != Searcher.FINISHED:
        assert config is not None
        tune.on_trial_complete(name, error=True)
    assert next(names) == 7


def test_a_trial_takes_the_cpus_and_gpus_that_it_is_given() -> None:
    assert trial_resources(num_cpus=2.0, num_gpus=0.5).required_resources == {"CPU": 2.0, "GPU": 0.5}
    assert trial_resources(num_cpus=1.0, num_gpus=0.0).required_resources == {"CPU": 1.0}
