"""What happened in each round of a generation: Parquet, one row a round, from which replays need no model.

K drafted tokens, S = K + 1 scored rows. Columns cover the whole block, also behind the first mismatch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serving.errors import ConfigError
from serving.types import EMPTY_IDS, Ids, as_ids

VERSION = "1"
_KEY = b"drafthouse_trace"


@dataclass(frozen=True)
class StepRecord:
    """One round of one request.

    position      tokens (prompt and output) before the block
    prompt_ids    of the first round; empty in the others
    source        who drafted: "none" where K = 0
    draft_ids     K;  next_ids S: what the target emits on each row;  regret K, nats (inf: impossible)
    num_accepted  as judged;  emitted_ids: what was committed, stops and limits applied
    """

    request_id: str
    task: str
    round: int
    position: int
    prompt_ids: list[int]
    source: str
    draft_ids: list[int]
    next_ids: list[int]
    regret: list[float]
    num_accepted: int
    emitted_ids: list[int]


_IDS = pa.list_(pa.int32())
SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("task", pa.string()),
        ("round", pa.int32()),
        ("position", pa.int32()),
        ("prompt_ids", _IDS),
        ("source", pa.string()),
        ("draft_ids", _IDS),
        ("next_ids", _IDS),
        ("regret", pa.list_(pa.float32())),
        ("num_accepted", pa.int32()),
        ("emitted_ids", _IDS),
    ],
    metadata={_KEY: VERSION.encode()},
)


@dataclass(frozen=True)
class Trace:
    """One request, its rounds in order."""

    request_id: str
    task: str
    prompt_ids: Ids
    steps: Sequence[StepRecord]

    @property
    def output_ids(self) -> Ids:
        emitted = [as_ids(step.emitted_ids) for step in self.steps]
        return np.concatenate(emitted) if emitted else EMPTY_IDS


def write_steps(path: Path, steps: Iterable[StepRecord]) -> None:
    """All or nothing: the file appears under its name only when it is whole."""
    partial = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pylist([asdict(step) for step in steps], SCHEMA), partial, compression="zstd")
    partial.replace(path)


def read_traces(path: Path) -> list[Trace]:
    """The requests of a trace file, or of all in a folder, in order. Raises ConfigError for what is no trace."""
    paths = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not paths or not all(one.is_file() for one in paths):
        raise ConfigError(f"trace: {path} is no trace file and no folder of them")
    steps: dict[str, list[StepRecord]] = {}
    for one in paths:
        for step in _read(one):
            steps.setdefault(step.request_id, []).append(step)
    return [Trace(name, found[0].task, as_ids(found[0].prompt_ids), found) for name, found in steps.items()]


def _read(path: Path) -> Iterable[StepRecord]:
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"trace: {path} is no Parquet file: {error}") from None
    version = (table.schema.metadata or {}).get(_KEY, b"none").decode()
    if version != VERSION:
        raise ConfigError(f"trace: {path} has trace version {version}, {VERSION} is read here; capture it anew")
    names = [field.name for field in fields(StepRecord)]
    return (StepRecord(**row) for row in table.select(names).to_pylist())
