"""What the requests of both completions endpoints share: what is supported, what must be neutral, nothing else.

Every OpenAI parameter is a field of a body. A field typed None is not supported: its neutral values pass, any
other value is a 400 that names it; so is a parameter that nobody knows.
"""

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

from serving.api.neutral import Encodable, Text, only, refused
from serving.requests import Tightening

MAX_CHOICES = 16
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_SALT_CHARS = 256


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _or(default: object) -> BeforeValidator:
    """Null is the same as leaving a parameter out."""
    return BeforeValidator(lambda value: default if value is None else value)


class Speculation(Strict):
    """What a request may tighten, and `detail` for the tier of every token in the receipt.

    `mode` off decodes plainly, strict accepts only the target's own tokens; `max_draft` lowers the profile's K, the
    others the controls of its ASD rule.
    """

    mode: Annotated[Literal["profile", "strict", "off"], _or("profile")] = "profile"
    max_draft: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    budget: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    gate: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    max_exceptions: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    detail: Annotated[bool, _or(False)] = False

    @field_validator("max_draft")
    @classmethod
    def _agrees_with_mode(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and info.data.get("mode") == "off":
            raise refused(f"must be 0 or absent where mode is 'off', got {value}")
        return value

    @field_validator("budget", "gate", "max_exceptions")
    @classmethod
    def _has_an_effect(cls, value: float | None, info: ValidationInfo) -> float | None:
        mode = info.data.get("mode", "profile")
        if value is not None and mode != "profile":
            raise refused(f"has no effect where mode is {mode!r}; leave one of them out")
        return value

    @property
    def draft_limit(self) -> int | None:
        """The largest K wanted; None leaves it to the profile."""
        return 0 if self.mode == "off" else self.max_draft

    @property
    def tightening(self) -> Tightening:
        return Tightening(self.mode != "profile", self.budget, self.gate, self.max_exceptions)


class StreamOptions(Strict):
    """`include_usage` adds one last chunk with the usage of the whole request."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[None, only(False)] = None
    continuous_usage_stats: Annotated[None, only(False)] = None


def _stops(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """One stop or a list of them; what is wrong with one is said of `stop`, not of a list that nobody sent."""
    return [_ONE_STOP.validate_python(value)] if isinstance(value, str) else check([] if value is None else value)


def _speculation(value: object) -> object:
    if isinstance(value, str | bool | int | float | list):
        raise refused('must be an object such as {"mode": "off"}')
    return {} if value is None else value


TokenCount = Annotated[int, Field(ge=1, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS), Encodable]
_ONE_STOP: TypeAdapter[str] = TypeAdapter(Stop)
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False), _or(0.0)]
Share = Annotated[float, Field(le=1.0, allow_inf_nan=False)]


class CompletionBody(Strict):
    """The parameters that both endpoints share."""

    model: Text
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), _or(1)] = 1
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    stop: Annotated[list[Stop], Field(max_length=MAX_STOPS), WrapValidator(_stops)] = []
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False), _or(0.0)] = 0.0
    top_p: Annotated[Share, Field(gt=0.0), _or(1.0)] = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES), _or({})] = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    user: str | None = None

    speculation: Annotated[Speculation, BeforeValidator(_speculation)] = Speculation()
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS), Encodable] | None = None

    # What other servers of open models take as well; -1 and 0 turn top_k off
    top_k: Annotated[int, Field(ge=-1, lt=2**31), _or(0)] = 0
    min_p: Annotated[Share, Field(ge=0.0), _or(0.0)] = 0.0
    min_tokens: Annotated[int, Field(ge=0, lt=2**31), _or(0)] = 0
    ignore_eos: Annotated[bool, _or(False)] = False
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS), _or([])] = []
    repetition_penalty: Annotated[None, only(1, hint="use frequency_penalty or presence_penalty")] = None
    skip_special_tokens: Annotated[None, only(True)] = None

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
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to list beside each token; None where no log probability is asked for."""
        return None
