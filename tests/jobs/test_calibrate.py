"""What `calibrate` writes and refuses to write; the strict runs themselves are scripted."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from jobs.__main__ import main
from jobs.recorded import Recording
from serving.config import ModelDrafter, load_profile
from tuning.mismatches import Mismatch

FOUND = [Mismatch(4, place % 4, 1, 2, 0.1 + place / 10) for place in range(40)]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "p", "task": "t", "turns": ["Say hello."]}) + "\n")
    return path


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Mismatch]:
    """What the strict runs find; a test may change it."""
    mismatches = list(FOUND)
    tokenizer = SimpleNamespace(special_ids=frozenset(), stop_ids=frozenset({2_000}), fingerprint="f00d")
    monkeypatch.setattr("jobs.calibrate.record_mismatches", lambda *_: iter([mismatches]))
    monkeypatch.setattr("jobs.calibrate.ChatTokenizer.load", lambda _: tokenizer)
    return mismatches


@pytest.fixture
def no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        pytest.fail("the strict runs have begun")

    monkeypatch.setattr("jobs.calibrate.record_mismatches", run)


@pytest.mark.usefixtures("no_runs")
@pytest.mark.parametrize("method", ["asd", "csd"])
@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("same.parquet", "--out: must end in .yaml or .yml, got"),
        ("mine", "--out: must end in .yaml or .yml, got"),
        ("my profile.yaml", "--out: the file's stem is the profile's name, name: String should match pattern"),
        (f"{'x' * 65}.yaml", "--out: the file's stem is the profile's name, name: String should have at most 64"),
    ],
)
def test_a_file_that_could_not_be_loaded_is_refused_before_the_run(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, out: str, said: str
) -> None:
    assert main(["calibrate", method, "--prompts", str(prompts), "--out", str(tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("method", ["asd", "csd"])
def test_a_written_profile_has_the_models_of_the_run_and_nothing_else_of_it(
    prompts: Path, tmp_path: Path, method: str
) -> None:
    base, out = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text(
        "name: base\ndrafter: {kind: model, max_draft: 3}\nengine: {max_queued: 7}\nallow_uncertified: true"
    )
    flags = ["--batch", "2", "--max-length", "256", "--drafter", "smollm2-135m-drafter", "--dtype", "float32"]
    argv = ["calibrate", method, "--profile", str(base), "--prompts", str(prompts), "--out", str(out), *flags]
    assert main(argv) == 0
    written = yaml.safe_load(out.read_text())
    assert written["target"] == {"model": "smollm2-135m-instruct", "dtype": "float32"}
    assert written["drafter"]["model"] == "smollm2-135m-drafter"
    assert written["engine"] == {"max_queued": 7}
    assert load_profile(str(out)).drafter == load_profile(str(base)).drafter
    assert load_profile(str(out)).rule.kind == method
    assert not load_profile(str(out)).allow_uncertified


@pytest.mark.usefixtures("found")
def test_an_infinite_setting_survives(prompts: Path, tmp_path: Path) -> None:
    base, out = tmp_path / "base.yaml", tmp_path / "mine.yml"
    base.write_text("name: base\ndrafter: {kind: hybrid, chooser: {kind: yield, tau: .inf}}")
    assert main(["calibrate", "asd", "--profile", str(base), "--prompts", str(prompts), "--out", str(out)]) == 0
    assert load_profile(str(out)).drafter == load_profile(str(base)).drafter


@pytest.mark.parametrize(("times", "warned"), [(6, True), (7, False)])
def test_a_table_that_nominates_nothing_is_warned_of(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], found: list[Mismatch], times: int, warned: bool
) -> None:
    found[:] = [Mismatch(4, 0, 1, 2, 0.5)] * times
    assert main(["calibrate", "csd", "--prompts", str(prompts), "--out", str(tmp_path / "mine.yaml")]) == 0
    told = capsys.readouterr()
    assert ("nominates nothing; give more prompts" in told.err) is warned
    assert json.loads(told.out)["pairs_above"] == (not warned)


def test_what_an_earlier_drafter_met_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights, profile = tmp_path / "model.safetensors", load_profile("strict")
    profile = profile.model_copy(update={"drafter": ModelDrafter(model=str(tmp_path))})
    keys = []
    for content in (b"first", b"retrained"):
        weights.write_bytes(content)
        keys.append(Recording(profile, max_tokens=8, path=tmp_path / "r.jsonl").key)
    assert keys[0] != keys[1]
