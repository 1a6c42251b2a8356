"""The requests of both completions endpoints: what is supported, what must be neutral, and nothing else.

Every OpenAI parameter is a field here. A field typed None is not supported: its neutral values pass, any
other value is a 400 that names it; so is a parameter that nobody knows.
"""

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
)

from serving.api.neutral import Encodable, Text, encodable, only, refused

MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_SALT_CHARS = 256
TOOLS = "tools and functions cannot be called here"
SAMPLING = "sampling is not supported yet, decoding is greedy"


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Speculation(_Body):
    """What a request may tighten: `mode` off decodes plainly, `max_draft` lowers the profile's K."""

    mode: Literal["profile", "off"] = "profile"
    max_draft: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    @field_validator("max_draft")
    @classmethod
    def _agrees_with_mode(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and info.data.get("mode") == "off":
            raise refused(f"must be 0 or absent where mode is 'off', got {value}")
        return value

    @property
    def draft_limit(self) -> int | None:
        """The largest K wanted; None leaves it to the profile."""
        return 0 if self.mode == "off" else self.max_draft


class StreamOptions(_Body):
    """`include_usage` adds one last chunk with the usage of the whole request."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[None, only(False)] = None
    continuous_usage_stats: Annotated[None, only(False)] = None


def _stops(value: object) -> object:
    return [value] if isinstance(value, str) else [] if value is None else value


TokenCount = Annotated[int, Field(ge=1, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS), Encodable]


class CompletionBody(_Body):
    """The parameters that both endpoints share."""

    model: Text
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    stop: Annotated[list[Stop], Field(max_length=MAX_STOPS), BeforeValidator(_stops)] = []
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    user: str | None = None

    speculation: Speculation | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS), Encodable] | None = None

    n: Annotated[None, only(1, hint="send one request for each choice")] = None
    top_p: Annotated[None, only(1, hint=SAMPLING)] = None
    frequency_penalty: Annotated[None, only(0)] = None
    presence_penalty: Annotated[None, only(0)] = None
    logit_bias: Annotated[None, only({})] = None

    # What other servers of open models take as well
    top_k: Annotated[None, only(-1, 0, hint=SAMPLING)] = None
    min_p: Annotated[None, only(0, hint=SAMPLING)] = None
    repetition_penalty: Annotated[None, only(1)] = None
    min_tokens: Annotated[None, only(0)] = None
    ignore_eos: Annotated[None, only(False)] = None
    stop_token_ids: Annotated[None, only([])] = None
    skip_special_tokens: Annotated[None, only(True)] = None

    @field_validator("temperature")
    @classmethod
    def _greedy(cls, value: float | None) -> float | None:
        if value:
            raise refused(f"sampling is not supported yet; use 0 or leave it out (got {value:g})", code="unsupported")
        return value

    @field_validator("stream_options")
    @classmethod
    def _only_with_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise refused("is allowed only where stream is true; leave it out or stream")
        return value

    @property
    def output_limit(self) -> int | None:
        """The new tokens asked for; None where the request does not say."""
        return self.max_tokens

    @property
    def output_limit_field(self) -> str:
        """The parameter that `output_limit` comes from."""
        return "max_tokens"

    @property
    def draft_limit(self) -> int | None:
        return None if self.speculation is None else self.speculation.draft_limit

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TextPart(_Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: Text


def _parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise refused("must be a string or a list of text parts")
    return value


class Message(_Body):
    """One turn; the neutral fields let a client send back an assistant's message as it received it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], Field(min_length=1), BeforeValidator(_parts)]
    name: Annotated[None, only()] = None
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
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    audio: Annotated[None, only()] = None
    function_call: Annotated[None, only("none", "auto", hint=TOOLS)] = None
    functions: Annotated[None, only([], hint=TOOLS)] = None
    logprobs: Annotated[None, only(False)] = None
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
    top_logprobs: Annotated[None, only(0)] = None
    verbosity: Annotated[None, only("medium")] = None
    web_search_options: Annotated[None, only()] = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _agrees_with_max_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        other = info.data.get("max_tokens")
        if value is not None and other is not None and value != other:
            raise refused(f"is {value}, but max_tokens is {other}; send one of them")
        return value

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens or self.max_completion_tokens

    @property
    def output_limit_field(self) -> str:
        return "max_tokens" if self.max_tokens else "max_completion_tokens"


def _one_prompt(value: object) -> object:
    """A string, or token ids; a list of one prompt is that prompt."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return encodable(value)
    if not isinstance(value, list):
        raise refused("must be a string or a list of token ids")
    if value and all(isinstance(item, str | list) for item in value):
        raise refused(f"holds {len(value)} prompts, but one request has one prompt; send {len(value)} requests")
    if any(isinstance(item, bool) or not isinstance(item, int) for item in value):
        raise refused("must be a string or a list of token ids, which are whole numbers")
    return tuple(value)


class TextBody(CompletionBody):
    """The body of /v1/completions."""

    prompt: Annotated[str | tuple[int, ...], PlainValidator(_one_prompt, json_schema_input_type=str | list[int])]

    best_of: Annotated[None, only(1)] = None
    echo: Annotated[None, only(False)] = None
    logprobs: Annotated[None, only(False)] = None
    suffix: Annotated[None, only("")] = None
