"""Prompt files: what is read, what is refused, and how a few are chosen."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serving.errors import ConfigError
from tuning.prompts import Prompt, read_prompts, select


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def test_jsonl_and_parquet_are_the_same(tmp_path: Path) -> None:
    records = [{"id": "a", "task": "x", "turns": ["hello", "again"], "reference": [["1", "2"]]}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "p.parquet")
    assert read_prompts(write(tmp_path / "p.jsonl", *records)) == read_prompts(tmp_path / "p.parquet")
    assert read_prompts(tmp_path / "p.jsonl")[0].text == "hello"


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([{"id": "a"}], "line 1: turns"),
        ([{"id": "a", "turns": []}], "line 1: turns"),
        ([{"id": "a", "turns": ["x"]}, {"id": "a", "turns": ["y"]}], "'a' appears more than once"),
        ([], "holds no prompt"),
        ([[1]], "line 1"),
    ],
)
def test_bad_files_are_refused_by_line_and_field(tmp_path: Path, records: list[object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_prompts(write(tmp_path / "p.jsonl", *records))


def test_what_is_not_json_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "turns": ["x"]}\n{oops\n')
    with pytest.raises(ConfigError, match="line 2: not JSON"):
        read_prompts(path)


def test_line_separators_inside_a_string_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\ufeff{"id": "a", "turns": ["x\u2028y"]}\n', encoding="utf-8")
    assert read_prompts(path)[0].text == "x\u2028y"


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
def test_files_of_another_kind_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfe\x00garbage")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / name)


def test_half_a_surrogate_pair_is_refused_by_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 1: turns"):
        read_prompts(write(tmp_path / "p.jsonl", {"id": "a", "turns": ["\ud800"]}))


def test_tasks_take_turns() -> None:
    prompts = [Prompt(id=f"{task}{i}", task=task, turns=("x",)) for task in "ab" for i in range(3)]
    assert [p.id for p in select(prompts, limit=3)] == ["a0", "b0", "a1"]
    assert [p.id for p in select(prompts, tasks=["b"], limit=2)] == ["b0", "b1"]
    assert select(prompts) == prompts
