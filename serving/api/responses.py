"""The responses of both endpoints in OpenAI's shape, with Drafthouse's receipt in `speculation`.

Stream chunks are written without the fields that were not set: a constructor names what goes on the wire.
"""

from dataclasses import asdict
from typing import Literal

from pydantic import BaseModel

from serving.types import Receipt

FinishReason = Literal["stop", "length"]


class Usage(BaseModel):
    """Tokens of one request; `completion_tokens` is what was delivered, the stop token included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class SpeculationReceipt(BaseModel):
    """What speculation did for one request; counts are tokens, rounds and target passes."""

    rounds: int
    drafted: int
    accepted: int
    emitted: int
    target_passes: int
    drafts_empty: int
    resumed: int
    degraded: bool
    lossless: bool
    reason: str
    acceptance_rate: float

    @classmethod
    def of(cls, receipt: Receipt) -> "SpeculationReceipt":
        return cls(**asdict(receipt), acceptance_rate=receipt.acceptance_rate)


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int = 0
    message: ChatMessage
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    speculation: SpeculationReceipt


class Frame(BaseModel):
    """One event of a stream; `usage` is on the wire only where the request asked for it."""

    id: str
    created: int
    model: str
    usage: Usage | None = None
    speculation: SpeculationReceipt | None = None


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatDeltaChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: FinishReason | None


class ChatChunk(Frame):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatDeltaChoice]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: None
    finish_reason: FinishReason | None


class TextCompletion(Frame):
    """Whole answer and stream chunk alike: the legacy endpoint has one shape for both."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "drafthouse"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail
