"""The body of /v1/completions."""

from typing import Annotated, TypeAlias

from pydantic import Field, PlainValidator, ValidationInfo, field_validator

from serving.api.neutral import encodable, only, refused
from serving.api.schema import CompletionBody

MAX_PROMPTS = 16
MAX_LOGPROBS = 5

OnePrompt: TypeAlias = str | tuple[int, ...]
JsonPrompts: TypeAlias = str | list[int] | list[str] | list[list[int]]


def _prompts(value: object) -> dict[str, OnePrompt]:
    """One prompt or a list of them, each under the name of its place in the body."""
    if not isinstance(value, list) or not value or not all(isinstance(item, str | list) for item in value):
        return {"prompt": _one_prompt(value)}
    if len(value) > MAX_PROMPTS:
        raise refused(f"holds {len(value)} prompts, but one request may hold {MAX_PROMPTS}; send several requests")
    return {f"prompt.{index}": _one_prompt(item) for index, item in enumerate(value)}


def _one_prompt(value: object) -> OnePrompt:
    if isinstance(value, str):
        return encodable(value)
    if not isinstance(value, list):
        raise refused("must be a string or a list of token ids, or a list of such prompts")
    if any(isinstance(item, bool) or not isinstance(item, int) for item in value):
        raise refused("must be a string or a list of token ids, which are whole numbers")
    return tuple(value)


class TextBody(CompletionBody):
    """The parameters of a text completion; `prompt` is one prompt or several, each under the name of its place."""

    prompt: Annotated[dict[str, OnePrompt], PlainValidator(_prompts, json_schema_input_type=JsonPrompts)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Annotated[None, only("")] = None

    @field_validator("echo")
    @classmethod
    def _not_with_logprobs(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("logprobs") is not None:
            raise refused("log probabilities of the prompt are not supported; leave out echo or logprobs")
        return value

    @field_validator("best_of")
    @classmethod
    def _is_n(cls, value: int | None, info: ValidationInfo) -> int | None:
        n = info.data.get("n", 1)
        if value not in (None, 1, n):
            raise refused(f"is {value}, but answers are not ranked here: leave it out, or ask for n = {value} choices")
        return value

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs
