"""Calibrate and audit end to end on the embedded model: files, resumption, one-line errors."""

import hashlib
import json
from pathlib import Path

import pytest

from jobs.__main__ import main
from jobs.audited import AuditRuns
from jobs.recorded import Recording, record_mismatches
from serving.config import load_profile
from serving.config_rules import CsdRule
from tuning.prompts import read_prompts

QUESTIONS = ["Name a colour.", "What is 2 + 2?", "Say hello in three languages.", "Count to five."]
FLAGS = ("--max-tokens", "24", "--batch", "2", "--max-length", "256")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    records = [{"id": f"p{i}", "task": "sum", "turns": [text], "reference": "4"} for i, text in enumerate(QUESTIONS)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.slow
def test_a_calibrated_table_is_part_of_a_profile_that_can_be_audited(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.yaml"
    assert main(["calibrate", "csd", "--prompts", str(prompts), "--out", str(out), *FLAGS]) == 0
    told = json.loads(capsys.readouterr().out)
    profile = load_profile(str(out))
    assert (profile.name, profile.allow_uncertified) == ("mine", False)
    assert isinstance(profile.rule, CsdRule)
    assert profile.rule.table == str(out.with_suffix(".parquet"))
    assert profile.rule.calibration is not None
    assert told["pairs"] > 0

    record = out.with_suffix(".mismatches.jsonl")
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(lines[:2]) + lines[2][:20])  # killed while it wrote the third line
    assert main(["calibrate", "csd", "--prompts", str(prompts), "--out", str(out), *FLAGS]) == 0
    assert json.loads(capsys.readouterr().out) == told
    assert load_profile(str(out)).rule.table_hash == profile.rule.table_hash  # type: ignore[union-attr]

    report_path = tmp_path / "audit.json"
    audit = ["audit", "--profile", str(out), "asd", "--prompts", str(prompts), "--json", str(report_path), *FLAGS]
    audit += ["--speed-minutes", "0.02"]
    assert main(audit) == 0
    report = json.loads(report_path.read_text())
    assert list(report["arms"]) == ["plain", "strict", "mine", "asd"]
    assert list(report["paired"]) == list(report["profiles"]) == ["mine", "asd"]
    assert report["problems"] == {}
    assert report["arms"]["strict"]["exceptions_per_request"] == 0
    assert report["arms"]["plain"]["target_passes_per_token"] == 1.0
    assert list(report["speed"]["candidates"]) == ["plain", "mine", "asd"]
    assert report["speed"]["triples"][0]["num_tokens"] == 2 * 24
    assert "| protocol met |" in report_path.with_suffix(".md").read_text()
    assert report_path.with_suffix(".png").stat().st_size > 1000
    assert main(audit) == 0  # from what is on file
    again = json.loads(report_path.read_text())
    assert (again["arms"], again["speed"]) == (report["arms"], report["speed"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["calibrate", "asd", "--profile", "plain"], "--profile: 'plain' drafts nothing"),
        (["calibrate", "asd", "--profile", "via"], "--profile: 'via' verifies by 'via'"),
        (["calibrate", "csd", "--max-pairs", "0"], "--max-pairs: must be at least 1"),
        (["audit", "--profile", "strict"], "--profile: 'strict' is what others are compared with"),
        (["audit", "--profile", "asd", "asd"], "--profile: two of them are named 'asd'"),
        (["audit", "--profile", "asd", "--speed-minutes", "0"], "--speed-minutes: must be a time of more than 0"),
        (["audit", "--profile", "asd", "--speed-minutes", "nan"], "--speed-minutes: must be a time of more than 0"),
        (["audit", "--profile", "asd", "suffix"], "'suffix' and 'asd' differ in `drafter`"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    out = ["--json", str(tmp_path / "a.json")] if argv[0] == "audit" else ["--out", str(tmp_path / "a.yaml")]
    assert main([*argv, "--prompts", str(prompts), *out]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"text": "0" * 16}, "was made with another text of prompt 'p1'"),
        ({"text": None}, "was made with another text of prompt 'p1'"),
        ({"key": "other"}, "was made with another profile, drafter or --max-tokens"),
    ],
)
def test_a_recording_of_other_prompts_or_settings_is_refused(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, str], said: str
) -> None:
    out = tmp_path / "mine.yaml"
    recording = Recording(load_profile("strict"), max_tokens=24, path=out.with_suffix(".mismatches.jsonl"))
    text = hashlib.sha256(QUESTIONS[1].encode()).hexdigest()[:16]
    record = {"key": recording.key, "id": "p1", "text": text, "found": []}
    recording.path.write_text(json.dumps(record) + "\n")
    assert next(record_mismatches(recording, read_prompts(prompts))) == []
    recording.path.write_text(json.dumps(record | changed) + "\n")
    assert main(["calibrate", "csd", "--prompts", str(prompts), "--out", str(out), "--max-tokens", "24"]) == 2
    refused = [line for line in capsys.readouterr().err.splitlines() if line.startswith("calibrate")]
    assert len(refused) == 1
    assert said in refused[0]


def test_profiles_that_differ_in_their_guard_are_audited_together_for_none_is_guarded(tmp_path: Path) -> None:
    guarded = load_profile("asd")
    engine = guarded.engine.model_copy(update={"guard": not guarded.engine.guard})
    other = guarded.model_copy(update={"name": "other", "engine": engine})
    assert AuditRuns([guarded, other], [], 8, tmp_path / "a.jsonl").arms[2:] == ("asd", "other")


@pytest.mark.parametrize("kept", ['{"key": "other", "number": 0, "runs": {}}', '{"key": "of another release"}'])
def test_answers_of_another_audit_are_not_mixed_in(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: str
) -> None:
    beside = tmp_path / "a.answers.jsonl"
    beside.write_text(kept + "\n")
    assert main(["audit", "--profile", "asd", "--prompts", str(prompts), "--json", str(tmp_path / "a.json")]) == 2
    assert "is of an audit with other settings" in capsys.readouterr().err
