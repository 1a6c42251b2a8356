"""Prompt files: JSON lines or Parquet with `id`, `task`, `turns`, and where a task has them `reference`, `test`."""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from serving.errors import ConfigError, one_line


class Prompt(BaseModel):
    """One prompt; `turns` are the user's turns in order, of which the first is what single-turn jobs answer."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str = Field(min_length=1)
    turns: tuple[str, ...] = Field(min_length=1)
    task: str = "default"
    reference: JsonValue = None
    test: str | None = None
    entry_point: str | None = None

    @property
    def text(self) -> str:
        return self.turns[0]


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a .jsonl or .parquet file. Raises ConfigError naming file, line and field."""
    if not path.is_file():
        raise ConfigError(f"--prompts: {path} is no file")
    prompts = [_prompt(path, number, record) for number, record in _records(path)]
    ids = [prompt.id for prompt in prompts]
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise ConfigError(f"--prompts {path}: id {twice!r} appears more than once")
    if not prompts:
        raise ConfigError(f"--prompts {path}: the file holds no prompt")
    return prompts


def select(prompts: Sequence[Prompt], *, tasks: Sequence[str] = (), limit: int | None = None) -> list[Prompt]:
    """Those of `tasks` (all if empty), at most `limit`: tasks take turns, so that a few prompts are already mixed."""
    known = {prompt.task for prompt in prompts}
    unknown = [task for task in tasks if task not in known]
    if unknown:
        raise ConfigError(f"--tasks: no prompt of task {unknown[0]!r}; there are {', '.join(sorted(known))}")
    chosen = [prompt for prompt in prompts if not tasks or prompt.task in tasks]
    if limit is None or limit >= len(chosen):
        return chosen
    queues: dict[str, deque[Prompt]] = {}
    for prompt in chosen:
        queues.setdefault(prompt.task, deque()).append(prompt)
    picked: list[Prompt] = []
    while len(picked) < limit:
        for queue in queues.values():
            if queue and len(picked) < limit:
                picked.append(queue.popleft())
    return picked


def _records(path: Path) -> Iterable[tuple[int, Any]]:
    try:
        if path.suffix == ".parquet":
            yield from enumerate(pq.read_table(path).to_pylist(), 1)
            return
        text = path.read_text(encoding="utf-8-sig")
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: cannot be read as UTF-8 JSON lines or Parquet: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):  # other line ends may stand inside a JSON string
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"--prompts {path}, line {number}: not JSON: {error.msg}") from None


def _prompt(path: Path, number: int, record: object) -> Prompt:
    try:
        prompt = Prompt.model_validate(record)
        prompt.text.encode()
    except ValidationError as error:
        raise ConfigError(f"--prompts {path}, line {number}: {one_line(error)}") from None
    except UnicodeEncodeError:
        raise ConfigError(f"--prompts {path}, line {number}: turns: holds half of a surrogate pair") from None
    return prompt
