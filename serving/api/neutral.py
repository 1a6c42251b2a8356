"""Validators that refuse in a sentence: what is not supported, and text that no tokenizer can read."""

import json
from typing import Annotated, LiteralString

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError


def refused(reason: str, *, code: LiteralString = "value") -> PydanticCustomError:
    """A validation error that says `reason` and nothing else."""
    return PydanticCustomError(code, "{reason}", {"reason": reason})


def only(*neutral: object, hint: str = "") -> BeforeValidator:
    """A parameter that is not supported: null and the `neutral` values change nothing and pass, no others."""

    def check(value: object) -> None:
        if value is not None and not any(_is_same(value, passing) for passing in neutral):
            raise refused(_sentence(neutral, hint), code="unsupported")

    return BeforeValidator(check)


def _is_same(value: object, neutral: object) -> bool:
    """Equal as JSON values: true is not 1, but 1.0 is."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _sentence(neutral: tuple[object, ...], hint: str) -> str:
    allowed = " or ".join(json.dumps(value) for value in neutral)
    remedy = f"leave it out or send {allowed}" if allowed else "leave it out"
    return f"is not supported: {remedy}{f'; {hint}' if hint else ''}"


def encodable(text: str) -> str:
    """`text` itself; refused where it has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refused(f"must be valid Unicode; character {error.start} is half of a surrogate pair") from None
    return text


Encodable = AfterValidator(encodable)
Text = Annotated[str, Encodable]
