"""`capture --workers` from end to end on a tiny model: two engines on Ray workers write what one process would."""

import json
from pathlib import Path

import pytest

from jobs.__main__ import main
from serving.trace import read_traces
from tests.cluster.conftest import jobs

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
NOBODY = "127.0.0.1:9"  # whoever tries to join a Ray there fails


@pytest.fixture
def flags(profile_file, tmp_path: Path) -> list[str]:
    """Seven prompts in four parts, 24 tokens each."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{i}", "task": "t", "turns": [f"Repeat the number {i} and then {i + 1}."]} for i in range(7)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    profile = profile_file("tiny-suffix", {"kind": "suffix", "max_draft": 4})
    return ["capture", "--profile", profile, "--prompts", str(prompts), "--part-size", "2", "--max-tokens", "24"]


def outputs(folder: Path) -> dict[str, list[int]]:
    return {trace.request_id: trace.output_ids.tolist() for trace in read_traces(folder)}


def test_two_workers_write_what_one_process_does_and_go_on_where_they_were(
    flags: list[str], tmp_path: Path, ray_address: str, capsys
) -> None:
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    by_two = [*flags, "--out", str(spread), "--workers", "2", "--address"]
    assert main([*flags, "--out", str(alone)]) == 0
    done = jobs(*by_two, ray_address)
    assert done.returncode == 0, done.stderr
    assert outputs(spread) == outputs(alone)
    assert sorted(outputs(spread)) == [f"p{i}" for i in range(7)]
    parts = sorted(spread.glob("part-*.parquet"))
    assert [part.name for part in parts] == [f"part-0000{i}.parquet" for i in range(4)]
    assert not list(spread.glob("*.partial"))
    written = {part: part.stat().st_mtime_ns for part in parts}
    parts[1].unlink()
    assert jobs(*by_two, ray_address).returncode == 0
    assert outputs(spread) == outputs(alone)
    assert {part for part in parts if part.stat().st_mtime_ns != written[part]} == {parts[1]}
    assert main([*by_two, NOBODY]) == 0  # all is there: no Ray is asked for
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"out": str(spread), "prompts": 7, "parts": 4}


def test_a_prompt_that_can_never_fit_is_one_line_before_ray_is_asked_for(
    flags: list[str], tmp_path: Path, capsys
) -> None:
    assert (
        main([*flags, "--out", str(tmp_path / "out"), "--max-length", "40", "--workers", "2", "--address", NOBODY]) == 1
    )
    error = capsys.readouterr().err
    assert "exceeds the 40 tokens" in error
    assert "Traceback" not in error


def test_what_a_worker_cannot_do_is_one_line(flags: list[str], tmp_path: Path) -> None:
    """On a Ray that the job starts by itself."""
    done = jobs(*flags, "--out", str(tmp_path / "out"), "--max-length", "4096", "--workers", "2")
    assert done.returncode == 1
    assert "capture: " in done.stderr
    assert "exceeds the 2048 positions" in done.stderr
    assert "Traceback" not in done.stderr
