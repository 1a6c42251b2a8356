"""The responses of both endpoints in OpenAI's shape and order, with Drafthouse's receipt in `speculation`.

All are written without the fields that were not set: a constructor names what goes on the wire. The receipt of an
answer with one choice is its own field, that of one with several a field of each choice. In a stream it rides on the
chunk with the choice's finish reason.
"""

from typing import Literal

from pydantic import BaseModel

from serving.types import Tier

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    """`cached_tokens` were in the KV cache already."""

    cached_tokens: int
    audio_tokens: int


class CompletionTokensDetails(BaseModel):
    """What became of the drafted tokens: OpenAI's predicted outputs, predicted here by a drafter."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int
    audio_tokens: int


class Usage(BaseModel):
    """Tokens of one request: each prompt once; `completion_tokens` is what all choices were given, stops included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SlimVerification(BaseModel):
    """What a slim verifier decided of one choice; `audit_regret` is in nats. Only where there is one."""

    accepted: int
    regenerated: int
    passes: int
    audited: int
    audit_regret: float
    unseen: int


class ExceptionEntry(BaseModel):
    """A token that is not the target's own choice: its place in the output, what the target preferred and by how much.

    `regret` is log p(target token) - log p(this token) in nats; `count` is how often the pair was seen before.
    """

    position: int
    draft_token: str
    draft_id: int
    target_token: str
    target_id: int
    regret: float
    count: int


class SpeculationReceipt(BaseModel):
    """What speculation did for one choice; counts are tokens, rounds and passes.

    `acceptance_rate` is null where nothing was drafted. Only of an answer that is not lossless: every exception, what
    they cost and may still cost, and what it was judged by. `tiers` has one entry a token where the request asked for
    detail.
    """

    rounds: int
    drafted: int
    accepted: int
    emitted: int
    replaced: int
    target_passes: int
    draft_passes: int
    drafts_empty: int
    cached_tokens: int
    resumed: int
    choices: dict[str, int]
    degraded: bool
    lossless: bool
    reason: str
    acceptance_rate: float | None
    budget: float | None = None
    regret_spent: float = 0.0
    regret_left: float | None = None
    num_exceptions: int = 0
    rescues: int = 0
    exhausted_at: int | None = None
    profile: str = ""
    memory: str = ""
    exceptions: list[ExceptionEntry] = []
    tiers: list[Tier] | None = None
    slim: SlimVerification | None = None


class TopLogprob(BaseModel):
    """One token with its log probability in nats; `bytes` are its own, be they half a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None


class TextLogprobs(BaseModel):
    """Columns, one entry a token; `text_offset` is where a token begins in the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    speculation: SpeculationReceipt | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    speculation: SpeculationReceipt | None = None


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatDeltaChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(BaseModel):
    """One event of a stream; `usage` is on the wire only where the request asked for it."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatDeltaChoice]
    usage: Usage | None = None
    speculation: SpeculationReceipt | None = None


class TextChoice(BaseModel):
    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    speculation: SpeculationReceipt | None = None


class TextCompletion(BaseModel):
    """Whole answer and stream chunk alike: the legacy endpoint has one shape for both."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    speculation: SpeculationReceipt | None = None


Frame = ChatChunk | TextCompletion
Whole = ChatCompletion | TextCompletion


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
