"""Offline answers to a file of prompts: order, resumption, refusals, one-line errors."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from jobs.__main__ import main

pytestmark = pytest.mark.slow

QUESTIONS = ["Name a colour.", "What is 2 + 2?", "Say hello.", "Count to five."]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": f"p{i}", "task": "ab"[i % 2], "turns": [text]}) for i, text in enumerate(QUESTIONS)]
    path.write_text("\n".join(lines) + "\n")
    return path


def generate(prompts: Path, out: Path, *flags: str) -> int:
    return main(["generate", "--prompts", str(prompts), "--out", str(out), "--max-tokens", "6", *flags])


def records(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_lines_come_in_order_with_everything_in_them(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert generate(prompts, out) == 0
    found = records(out)
    assert [record["id"] for record in found] == ["p0", "p1", "p2", "p3"]
    for record in found:
        assert set(record) == {"id", "prompt_ids", "output_ids", "text", "finish_reason", "receipt", "exceptions"}
        assert isinstance(record["output_ids"], list)
        assert 0 < len(record["output_ids"]) <= 6


def test_a_killed_run_goes_on_where_it_was(prompts: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    generate(prompts, whole)
    generate(prompts, cut)
    lines = cut.read_text().splitlines(keepends=True)
    cut.write_text("".join(lines[:2]) + lines[2][:40])  # killed while it wrote the third line
    assert generate(prompts, cut) == 0
    assert [(r["id"], r["output_ids"]) for r in records(cut)] == [(r["id"], r["output_ids"]) for r in records(whole)]
    assert generate(prompts, cut) == 0  # nothing left to do


def test_other_flags_on_the_same_file_are_refused(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    generate(prompts, out)
    assert generate(prompts, out, "--raw") == 2
    assert "made with other flags" in capsys.readouterr().err


def test_a_prompt_that_cannot_fit_gets_its_error_and_the_rest_their_answers(prompts: Path, tmp_path: Path) -> None:
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "long", "turns": ["word " * 400]}) + "\n")
    out = tmp_path / "out.jsonl"
    assert generate(prompts, out, "--max-length", "256") == 1
    found = {record["id"]: record for record in records(out)}
    assert "exceeds the 256 tokens" in str(found["long"]["error"])
    assert "output_ids" in found["p0"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tasks", "c"], "no prompt of task 'c'"),
        (["--limit", "0"], "--limit: must be at least 1"),
        (["--profile", "nope"], "neither a shipped profile"),
        (["--batch", "0"], "engine.max_sessions"),
        (["--max-draft", "999"], "drafter"),
    ],
)
def test_bad_flags_are_one_line(
    prompts: Path, tmp_path: Path, flags: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(prompts, tmp_path / "out.jsonl", *flags) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error
