"""`search via-theta`: what it takes for the same arm, its refusals, and one sweep from end to end on a toy."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs import search_via_theta
from jobs.__main__ import main
from jobs.search_via_theta import arm_key, plot_speed
from serving.config import ModelDrafter, Profile, SuffixDrafter, ViaVerifier, load_profile
from tests.models.toy import save_toy

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_LAYERS = 4


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_toy(tmp_path_factory.mktemp("toy"), num_hidden_layers=NUM_LAYERS)


@pytest.fixture
def profile(toy: str, tmp_path: Path) -> Path:
    """Three tiers over the toy, which drafts for itself, judged by ASD where they escalate."""
    mask, path = tmp_path / "mask.json", tmp_path / "toy.yaml"
    mask.write_text(json.dumps({"model": toy, "num_layers": NUM_LAYERS, "kept": [0, 1, 3]}))
    values: dict[str, Any] = {
        "name": "toy",
        "target": {"model": toy, "dtype": "float32"},
        "drafter": {"kind": "model", "model": toy, "max_draft": 3},
        "verifier": {"kind": "via", "mask": str(mask)},
        "rule": {"kind": "asd"},
        "engine": {"max_sessions": 2, "max_length": 64},
    }
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def flags(profile: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    asked = [{"id": str(number), "task": "t", "turns": [f"t{number} t7 t9"]} for number in (5, 6, 7)]
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in asked))
    where = ["--profile", str(profile), "--prompts", str(prompts), "--json", str(tmp_path / "report.json")]
    return [*where, "--max-tokens", "12", "--thetas", "0.3:0.1"]


def change_stats(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads(path.read_text())
    change(record["stats"])
    path.write_text(json.dumps(record))


def test_a_sweep_compares_with_strict_and_goes_on_where_it_was(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured, run = [], search_via_theta._run

    def noted(name: str, arm: Profile, texts: Sequence[str], max_tokens: int) -> Any:
        measured.append((name, arm.rule.kind))
        return run(name, arm, texts, max_tokens)

    monkeypatch.setattr(search_via_theta, "_run", noted)
    assert main(["search", "via-theta", *flags]) == 0
    assert measured == [("strict", "strict"), ("0.3:0.1", "asd")]
    report = json.loads((tmp_path / "report.json").read_text())
    strict, swept = report["arms"]
    assert (strict["regret/token"], strict["own tokens"], strict["slim/token"]) == (0.0, 1.0, 0.0)
    assert strict["tokens"] == swept["tokens"] == 36
    assert swept["slim/token"] > 0
    assert strict["audit regret"] is None
    assert swept["audit regret"] >= 0.0
    assert "the middle tier" in capsys.readouterr().out
    assert (tmp_path / "report.png").stat().st_size > 1000

    assert main(["search", "via-theta", *flags]) == 0
    assert len(measured) == 2
    assert json.loads((tmp_path / "report.json").read_text())["arms"][1]["tokens/s"] == swept["tokens/s"]

    lacking, other = sorted((tmp_path / "report.arms").iterdir())
    change_stats(lacking, lambda stats: stats.pop("rounds"))
    change_stats(other, lambda stats: stats.update(unknown=1))
    assert main(["search", "via-theta", *flags]) == 0  # what counted other things is measured again
    assert len(measured) == 4

    for path, damage in zip(sorted((tmp_path / "report.arms").iterdir()), ('{"name": "strict"', "[]"), strict=True):
        path.write_text(damage)
    assert main(["search", "via-theta", *flags]) == 0
    assert len(measured) == 6


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (["--thetas", "0.5"], "--thetas: must be pairs accept:escalate"),
        (["--thetas", "0.3:0.5"], "--thetas: 0 < escalate <= accept <= 2 must hold, got 0.3:0.5"),
        (["--thetas", "nan:0.5"], "--thetas: 0 < escalate <= accept <= 2 must hold, got nan:0.5"),
        (["--thetas", "0.5:0"], "--thetas: 0 < escalate"),
        (["--min-confidence", "7"], "--min-confidence: must lie within 0..1, got 7"),
        (["--min-confidence", "nan"], "--min-confidence: must lie within 0..1, got nan"),
        (["--profile", "strict"], "--profile: 'strict' has no slim verifier"),
        (["--mask", "nope"], "verifier.mask: 'nope' is neither"),
        (["--mask", "smollm2-135m-via"], "verifier.mask: was searched for 'smollm2-135m-instruct' with 30 layers"),
        (["--max-length", "16"], "--prompts: '5' (5 tokens) with --max-tokens 12 exceeds the 16 tokens a sequence"),
        (["--max-tokens", "0"], "--max-tokens: must be at least 1"),
        (["--limit", "0"], "--limit: must be at least 1"),
        (["--prompts", "/no/such/file"], "/no/such/file"),
        (["--json", "/proc/here/report.json"], "--json: the folder of"),
    ],
)
def test_a_wrong_flag_is_one_line_before_anything_runs(
    flags: list[str], flag: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search_via_theta, "_run", lambda *_: pytest.fail("an arm has begun"))
    assert main(["search", "via-theta", *flags, *flag]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_drafter_that_was_trained_anew_is_another_arm(toy: str, profile: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    keys = []
    for seed in (0, 0, 1):
        config = ModelDrafter(model=save_toy(drafter, num_hidden_layers=1, seed=seed), max_draft=3)
        keys.append(arm_key(load_profile(str(profile)).model_copy(update={"drafter": config}), 8, ["hello"]))
    assert keys[0] == keys[1] != keys[2]


def test_another_mask_in_the_same_file_is_another_arm(tmp_path: Path) -> None:
    file = tmp_path / "mask.json"
    profile = Profile(
        name="a",
        drafter=SuffixDrafter(),
        verifier=ViaVerifier(mask=str(file)),
    )
    keys = []
    for kept, found in (([0, 2], 1.0), ([0, 2], 2.0), ([0, 1, 2], 2.0)):
        file.write_text(json.dumps({"model": "m", "num_layers": 3, "kept": kept, "found": found}))
        keys.append(arm_key(profile, 8, ["hello"]))
    assert keys[0] == keys[1] != keys[2]


def test_the_plot_of_speed_against_quality_is_a_picture_and_may_have_one_pair_of_thetas(tmp_path: Path) -> None:
    rows = [
        {"thetas": "strict", "regret/token": 0.0, "tokens/s": 107.2},
        {"thetas": "0.9:0.7", "regret/token": 0.135, "tokens/s": 67.2},
        {"thetas": "0.3:0.1", "regret/token": 0.3249, "tokens/s": 69.4},
    ]
    for count in (2, 3):
        path = tmp_path / "plots" / f"{count}.png"
        plot_speed(rows[:count], path)
        picture = path.read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 5000
