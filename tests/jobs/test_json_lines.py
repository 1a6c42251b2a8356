"""What a killed run has left: a half line is cut off, a damaged one is named."""

from pathlib import Path

import pytest

from jobs.json_lines import read_lines
from serving.errors import ConfigError


def test_a_half_written_last_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"id": "a"}\n{"id": "b"}\n{"id"')
    assert read_lines(path, needs=("id",)) == [{"id": "a"}, {"id": "b"}]
    assert path.read_text() == '{"id": "a"}\n{"id": "b"}\n'


def test_no_file_holds_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "none.jsonl", needs=("id",)) == []


@pytest.mark.parametrize("damaged", [b'{"id": "b"', b"", b"[]", b"7", b'{"text": "b"}', b'{"id": "\xff"}'])
def test_a_damaged_line_is_one_sentence_with_its_number(damaged: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"id": "a"}\n' + damaged + b'\n{"id": "c"}\n')
    with pytest.raises(ConfigError, match=r"^--out: .*lines.jsonl, line 2: is no JSON object with id; ") as caught:
        read_lines(path, needs=("id",))
    assert "\n" not in str(caught.value)
