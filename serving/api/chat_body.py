"""The body of /v1/chat/completions."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from serving.api.neutral import Text, encodable, only, refused
from serving.api.schema import CompletionBody, Strict, TokenCount

MAX_TOP_LOGPROBS = 20
TOOLS = "tools and functions cannot be called here"
NAMES = "chat templates show no names, so write it into the content"


class TextPart(Strict):
    """One part of a message's content."""

    type: Literal["text"]
    text: Text


def _parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": encodable(value)}]
    if not isinstance(value, list):
        raise refused("must be a string or a list of text parts")
    return value


class Message(Strict):
    """One turn; the neutral fields let a client send back an assistant's message as it received it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], Field(min_length=1), BeforeValidator(_parts)]
    name: Annotated[None, only(hint=NAMES)] = None
    refusal: Annotated[None, only()] = None
    annotations: Annotated[None, only([])] = None
    audio: Annotated[None, only()] = None
    tool_calls: Annotated[None, only([], hint=TOOLS)] = None
    function_call: Annotated[None, only(hint=TOOLS)] = None

    @property
    def turn(self) -> dict[str, str]:
        """What the chat template takes: developer is system, parts are lines."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "\n".join(part.text for part in self.content)}


class ChatBody(CompletionBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    audio: Annotated[None, only()] = None
    function_call: Annotated[None, only("none", "auto", hint=TOOLS)] = None
    functions: Annotated[None, only([], hint=TOOLS)] = None
    modalities: Annotated[None, only(["text"])] = None
    moderation: Annotated[None, only()] = None
    parallel_tool_calls: Annotated[None, only(True, False, hint=TOOLS)] = None
    prediction: Annotated[None, only()] = None
    prompt_cache_options: Annotated[None, only({})] = None
    prompt_cache_retention: Annotated[None, only("in_memory")] = None
    reasoning_effort: Annotated[None, only("none")] = None
    response_format: Annotated[None, only({"type": "text"})] = None
    service_tier: Annotated[None, only("auto", "default")] = None
    store: Annotated[None, only(False, hint="answers are not stored here")] = None
    tool_choice: Annotated[None, only("none", "auto", hint=TOOLS)] = None
    tools: Annotated[None, only([], hint=TOOLS)] = None
    verbosity: Annotated[None, only("medium")] = None
    web_search_options: Annotated[None, only()] = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _agrees_with_max_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        other = info.data.get("max_tokens")
        if value is not None and other is not None and value != other:
            raise refused(f"is {value}, but max_tokens is {other}; send one of them")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _only_with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise refused(f"is {value}, but is allowed only where logprobs is true; leave it out or ask for logprobs")
        return value

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens or self.max_completion_tokens

    @property
    def output_limit_field(self) -> str:
        return "max_tokens" if self.max_tokens else "max_completion_tokens"
