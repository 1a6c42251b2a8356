"""`search via` without Ray: refusals, what of a search counts, and one search from end to end on a toy."""

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from cluster.resources import Bundle
from jobs.__main__ import main
from jobs.search_via import _identity, finals_bar, found_by, parser, search_bar, sound
from jobs.via_options import plan_of
from serving.config_mask import read_mask
from serving.errors import ConfigError
from serving.models.digest import model_digest
from serving.types import as_ids
from tests.models.toy import save_toy
from tuning.dimr import Agreement
from tuning.mask_finals import Rung
from tuning.mask_log import History, MaskLog, MaskSearch
from tuning.mask_space import Question, Space
from tuning.search import BenchRecipe
from tuning.selfgen import Dialogue, write_dialogues

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_LAYERS = 6
SMALL = ["--sizes", "2", "--rows", "32", "--held-out-rows", "40", "--final-rows", "40", "--budget", "8"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_toy(tmp_path_factory.mktemp("toy"), num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "dialogues.parquet"
    texts = [rng.integers(5, 190, 30) for _ in range(24)]
    write_dialogues(path, [Dialogue(as_ids(ids[:10]), as_ids(ids[10:])) for ids in texts])
    return path


@pytest.fixture
def flags(toy: str, data: Path, tmp_path: Path) -> list[str]:
    return ["--target", toy, "--dtype", "float32", "--data", str(data), "--out", str(tmp_path / "out"), *SMALL]


def by_hand(
    search: MaskSearch, recipe: BenchRecipe, folder: Path, *, on_mask: Callable[[], None], **resources: float
) -> None:
    """The questions of a search answered in this process."""
    benches = recipe.make()
    while (question := search.ask()) is not None:
        search.tell(question, benches[question.block].agreement(question.mask))
        on_mask()


def never(*args: object, **others: object) -> None:
    pytest.fail("the search has begun")


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two CPUs, and trials in this process."""
    monkeypatch.setattr("jobs.search_via.connected", lambda address: nullcontext())
    monkeypatch.setattr("jobs.search_via.all_nodes", lambda: [Bundle(2.0)])
    monkeypatch.setattr("jobs.search_via.search_masks", by_hand)


@pytest.mark.usefixtures("no_ray")
def test_a_search_leaves_masks_that_profiles_can_name_and_goes_on_from_its_log(
    flags: list[str], toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["search", "via", *flags]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    mask = read_mask(str(tmp_path / "out" / "mask-2.json"))
    mask.check(toy, NUM_LAYERS)
    assert mask.digest == model_digest(toy)
    best = min(report["arms"], key=lambda row: row["final cost"])
    assert list(mask.skipped) == best["skipped"]
    monkeypatch.setattr("jobs.search_via.search_masks", never)
    assert main(["search", "via", *flags]) == 0


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (["--cpus", "64"], "--cpus 64 --gpus 0: no node of this Ray has so many CPUs and GPUs (2 and 0)"),
        (["--gpus", "1"], "--cpus 1 --gpus 1: no node"),
    ],
)
def test_a_trial_that_fits_no_node_is_refused(
    flags: list[str], flag: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jobs.search_via.search_masks", never)
    assert main(["search", "via", *flags, *flag]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (["--sizes", "9"], "within 1..4"),
        (["--sizes", "two"], "numbers separated by commas"),
        (["--arms", "magic"], "none of even"),
        (["--budget", "4"], "needs at least 5 on 6 layers"),
        (["--rows", "0"], "--rows: must be at least 1, got 0"),
        (["--rows", "-3"], "--rows: must be at least 1, got -3"),
        (["--final-rows", "3"], "--final-rows: must be at least 4, got 3"),
        (["--held-out-rows", "0"], "--held-out-rows: must be at least 1, got 0"),
        (["--tokens", "-1"], "--tokens: must be at least 0, got -1"),
        (["--seed", "-1"], "--seed: must be at least 0, got -1"),
        (["--cpus", "0"], "--cpus: must be above 0 and finite, got 0"),
        (["--cpus", "-1"], "--cpus: must be above 0"),
        (["--cpus", "nan"], "--cpus: must be above 0"),
        (["--gpus", "-1"], "--gpus: must be at least 0"),
        (["--rows", "4000", "--held-out-rows", "20", "--final-rows", "20"], "--rows: 4000 positions"),
        (["--rows", "20", "--held-out-rows", "20", "--final-rows", "4000"], "--final-rows: 1000 positions"),
    ],
)
def test_a_wrong_flag_is_one_line(
    flags: list[str],
    flag: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("jobs.search_via.connected", never)
    assert main(["search", "via", *flags, *flag]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_dialogue_that_is_longer_than_the_target_reads_is_refused(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.parquet"
    write_dialogues(path, [Dialogue(as_ids([5] * 600), as_ids([6] * 20))])
    assert main(["search", "via", *flags, "--data", str(path)]) == 2
    assert "--data: a dialogue of 620 tokens exceeds the 512 positions" in capsys.readouterr().err


def test_a_damaged_record_of_finals_is_found_before_the_search(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jobs.search_via.connected", never)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "finals.jsonl").write_text("garbage\n")
    assert main(["search", "via", *flags]) == 2
    error = capsys.readouterr().err
    assert "finals.jsonl, line 1: is no line of a mask search" in error
    assert error.count("\n") == 1


def test_data_that_is_no_parquet_is_one_line(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p3.jsonl"
    path.write_text('{"id": "a", "turns": ["hello"]}\n')
    assert main(["search", "via", *flags, "--data", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"--data {path}: is no Parquet file" in error
    assert error.count("\n") == 1


def args_of(flags: Sequence[str]) -> argparse.Namespace:
    return parser().parse_args(flags)


def test_an_arm_that_is_named_twice_searches_once(flags: list[str]) -> None:
    assert plan_of(args_of([*flags, "--arms", "guided, random,guided"]), NUM_LAYERS).arms == ["guided", "random"]


def test_the_bar_begins_at_what_is_logged_and_ends_at_what_may_be_asked(flags: list[str], tmp_path: Path) -> None:
    plan = plan_of(args_of([*flags, "--arms", "even,random", "--sizes", "2,3"]), NUM_LAYERS)
    path = tmp_path / "log.jsonl"
    search = MaskSearch(plan, MaskLog(path, "toy"))
    for _ in range(3):
        question = search.ask()
        assert question is not None
        search.tell(question, Agreement(0.5, 0.0, 1.0))
    again = MaskSearch(plan, MaskLog(path, "toy"))
    again.ask()
    with search_bar(again, plan) as bar:
        assert (bar.n, bar.total) == (again.num_asked, 2 * 2 * 8)
    assert again.num_asked >= 3


def test_the_bar_of_the_finals_ends_at_what_may_be_judged(tmp_path: Path) -> None:
    space, masks = Space(6, 1), [(1,), (2,), (1,), (3,)]
    histories = [History("random", space, masks=masks, costs=[0.5] * 4), History("even", space, masks=[(2,)])]
    log = MaskLog(tmp_path / "finals.jsonl", "toy")
    log.add(Question((1,)), Agreement(0.5, 0.0, 1.0), 1.0)
    with finals_bar(histories, (Rung(24, 10), Rung(2, 30)), log) as bar:
        assert (bar.n, bar.total) == (1, 3 + 2 + 1 + 1)


def test_an_out_that_is_a_file_is_named(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("")
    assert main(["search", "via", *flags]) == 2
    error = capsys.readouterr().err
    assert f"--out: nothing can be written to {tmp_path / 'out'}" in error
    assert error.count("\n") == 1


def test_a_target_that_was_trained_anew_is_another_one(flags: list[str], tmp_path: Path) -> None:
    target = tmp_path / "target"
    args = args_of([*flags, "--target", save_toy(target, num_hidden_layers=2)])
    before = _identity(args, [])
    assert _identity(args, []) == before
    save_toy(target, num_hidden_layers=2, seed=1)
    assert _identity(args, []) != before


def test_so_is_another_dimr(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = _identity(args_of(flags), [])
    monkeypatch.setattr("jobs.search_via.ALPHA", 0.4)
    assert _identity(args_of(flags), []) != before


def test_an_arm_without_a_judged_mask_is_left_out_and_a_size_without_one_is_an_error() -> None:
    judged, empty = History("random", Space(12, 4), masks=[(1, 2, 3, 4)], costs=[0.5]), History("even", Space(12, 4))
    assert found_by([judged, empty], [4], "so it is") == [judged]
    with pytest.raises(ConfigError, match="no mask that skips 3 layers could be judged; so it is"):
        found_by([judged, empty, History("random", Space(12, 3))], [4, 3], "so it is")


def test_a_mask_without_a_cost_on_held_out_answers_drops_out() -> None:
    good, bad = (History("random", Space(6, 1), masks=[mask], costs=[0.5]) for mask in ((1,), (2,)))
    fine, broken = Agreement(0.5, 0.1, 0.9), Agreement(float("nan"), float("nan"), 0.0)
    assert sound([bad, good], {(1,): [(4, fine)], (2,): [(4, fine), (4, broken)]}) == [good]
