"""What an audit keeps of its runs: one line a group of prompts, with every arm's answers and time."""

from pydantic import BaseModel, ConfigDict

from serving.requests import Receipt
from serving.types import ExceptionRecord, FinishReason

PLAIN, STRICT = "plain", "strict"


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Answer(Record):
    """One prompt answered by one arm; `tiers` counts tokens by the tier that decided them."""

    prompt_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    receipt: Receipt
    exceptions: tuple[ExceptionRecord, ...]
    tiers: dict[str, int]

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


class Group(Record):
    """The same prompts in every arm, one arm after the other; `key` names the profile and settings."""

    key: str
    number: int
    runs: dict[str, ArmRun]
