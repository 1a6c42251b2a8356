"""`capture`: what its flags mean, and what it refuses."""

import json

import pytest

from jobs.capture import Capture, Capturer, Part, _check_folder, _part_from, _part_text, main
from serving.config import ModelConfig, Profile
from serving.errors import ConfigError
from tuning.prompts import Prompt

PART = Part(3, (Prompt(id="a", turns=("x", "y"), task="t"), Prompt(id="b", turns=("z",), reference={"k": [1]})))


def test_a_part_is_the_same_after_its_way_to_a_worker() -> None:
    assert _part_from(_part_text(PART)) == PART


def test_a_folder_of_another_run_is_refused(tmp_path) -> None:
    job = Capture(Profile(name="p"), tmp_path / "out", 20, every_position=False)
    _check_folder(job, [PART])
    _check_folder(job, [PART])
    with pytest.raises(ConfigError, match="made with other flags, prompts or weights"):
        _check_folder(Capture(job.profile, job.out, 21, every_position=False), [PART])


def test_a_worker_tells_what_a_user_is_meant_to_read(tmp_path) -> None:
    profile = Profile(name="p", target=ModelConfig(model="no such model"))
    worker = Capturer(Capture(profile, tmp_path, 20, every_position=False))
    found = worker({"part": [_part_text(PART)]})
    assert found["done"] == [0]
    assert found["error"][0].startswith("model: 'no such model' is neither shipped")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--part-size", "0"], "--part-size: must be at least 1, got 0"),
        (["--workers", "-1"], "--workers: must be at least 0, got -1"),
        (["--profile", "asd"], "'asd' is lossy"),
        (["--profile", "via"], "'via' is lossy"),
    ],
)
def test_bad_flags_are_named(tmp_path, flags: list[str], message: str) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"id": "a", "turns": ["x"]}))
    with pytest.raises(ConfigError, match=message):
        main(["--prompts", str(prompts), "--out", str(tmp_path / "out"), *flags])
