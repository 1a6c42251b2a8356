"""Files of JSON objects, one a line, that a killed run goes on with."""

import json
from pathlib import Path
from typing import Any

from serving.errors import ConfigError


def read_lines(path: Path, *, needs: tuple[str, ...]) -> list[dict[str, Any]]:
    """The objects in `path` (none without a file), each with the fields `needs`; cuts off a half-written last line.

    Raises ConfigError with the number of a line that is no such object.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
        path.write_bytes(b"".join(lines))
    return [_object(path, number, line, needs) for number, line in enumerate(lines, 1)]


def _object(path: Path, number: int, line: bytes, needs: tuple[str, ...]) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not all(field in record for field in needs):
        raise ConfigError(
            f"--out: {path}, line {number}: is no JSON object with {', '.join(needs)}; delete it with all lines after "
            "it, and they are made again"
        )
    return record
