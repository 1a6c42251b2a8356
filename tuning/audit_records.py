"""What an audit keeps of its runs: one line a group of prompts, with every arm's answers and time."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from serving.errors import ConfigError
from serving.requests import Receipt
from serving.types import ExceptionRecord, FinishReason, Tier

PLAIN, STRICT = "plain", "strict"


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KeyedRecord(Record):
    """A line of a file of an audit; `key` names the profiles and settings that it depends on."""

    key: str


class Answer(Record):
    """One prompt answered by one arm; `tiers` says of each token which one decided it."""

    prompt_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    receipt: Receipt
    exceptions: tuple[ExceptionRecord, ...]
    tiers: tuple[Tier, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.output_ids)


class ArmRun(Record):
    """One arm over one group. `accepted_at[i]` counts the drafts, of `num_drafts`, whose token i was kept."""

    seconds: float
    answers: tuple[Answer, ...]
    num_drafts: int
    accepted_at: tuple[int, ...]
    first_mismatches: tuple[int, ...]


class Group(KeyedRecord):
    """The same prompts in every arm, one arm after the other."""

    number: int
    runs: dict[str, ArmRun]


KeyedT = TypeVar("KeyedT", bound=KeyedRecord)


def read_records(path: Path, kind: type[KeyedT], key: str) -> list[KeyedT]:
    """The lines on file, none without a file; a half-written last one is dropped, other keys are a ConfigError."""
    if not path.is_file():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    if len(whole) < len(lines):
        path.write_bytes(b"".join(whole))
    try:
        records = [kind.model_validate_json(line) for line in whole]
    except ValidationError:  # of another release, or no such file at all
        records = None
    if records is None or any(record.key != key for record in records):
        raise ConfigError(f"--json: {path} is of an audit with other settings; delete it, or write elsewhere")
    return records
