"""From what went wrong to OpenAI's error body: one sentence, the parameter at fault, a status.

Messages come from the fields of our own errors, never from str(error): Ray's wrapper puts a traceback there.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from serving.errors import DrafthouseError, RequestError

RETRY_AFTER_S = 2
MAX_PATH_CHARS = 120
UNREADABLE = "The body could not be read as JSON in UTF-8."
# By name, since the API knows no Ray; an error that Ray wrapped still has the class of its cause as a base.
OVERLOADS = frozenset({"OverloadedError", "BackPressureError"})
OUTAGES = frozenset(
    {
        "RayActorError",
        "WorkerCrashedError",
        "NodeDiedError",
        "OwnerDiedError",
        "ChannelLostError",
        "DeploymentUnavailableError",
    }
)
VALIDATION_CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "unsupported": "unsupported_parameter",
}


@dataclass(frozen=True)
class Failure:
    """An error as the client sees it."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    allow: str | None = None

    @property
    def body(self) -> str:
        """OpenAI's error object as JSON; ASCII, so that any text a client sent can be quoted in it."""
        fields = asdict(self)
        return json.dumps({"error": {name: fields[name] for name in ("message", "type", "param", "code")}})

    def response(self) -> Response:
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.allow is not None:
            headers["allow"] = self.allow
        return Response(self.body, self.status, headers, media_type="application/json")


class ApiError(DrafthouseError):
    """An error that already knows its HTTP form. Raised and answered inside the gateway."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


class ContextLengthError(RequestError):
    """Prompt and answer do not fit into the model's context."""


def failure_of(error: Exception, *, request_id: str) -> Failure:
    """What to tell the client about `error`."""
    names = {base.__name__ for base in type(error).__mro__}
    match error:
        case ApiError():
            return error.failure
        case RequestError():
            code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"
            return Failure(400, f"{error.field}: {error.message}", param=error.field, code=code)
        case RequestValidationError():
            return _invalid(error.errors()[0])
        case HTTPException():
            return _refused(error)
    if names & OVERLOADS:
        message = f"The server has no room for another request now; try again in {RETRY_AFTER_S} s."
        return Failure(429, message, "rate_limit_error", code="overloaded", retry_after_s=RETRY_AFTER_S)
    if names & OUTAGES:
        message = f"The model is out of reach for the moment; try again in {RETRY_AFTER_S} s."
        return Failure(503, message, "server_error", code="unavailable", retry_after_s=RETRY_AFTER_S)
    message = f"The server failed on this request; if it happens again, report request id {request_id}."
    return Failure(500, message, "server_error", code="internal_error")


def _refused(error: HTTPException) -> Failure:
    match error.status_code:
        case 404:
            message = "There is no such route here; GET /openapi.json lists those there are."
            return Failure(404, message, code="unknown_route")
        case 405:
            allow = (error.headers or {}).get("Allow")
            return Failure(405, "This route does not take that HTTP method.", code="method_not_allowed", allow=allow)
        case 400:
            return Failure(400, UNREADABLE, code="invalid_json")
    return Failure(error.status_code, str(error.detail))


def _invalid(error: Mapping[str, object]) -> Failure:
    """One pydantic complaint as a sentence: path, constraint, and the value where it is short."""
    kind, location, given = str(error["type"]), error["loc"], error.get("input")
    assert isinstance(location, Sequence)
    if kind == "json_invalid":
        return Failure(400, f"The body is not valid JSON: {_context(error)}.", code="invalid_json")
    if kind == "string_unicode" and len(location) < 2:  # the name of a parameter
        return Failure(400, UNREADABLE, code="invalid_json")
    if len(location) < 2:
        message = "The body must be a JSON object, sent with the header Content-Type: application/json."
        return Failure(400, message, code="invalid_json")
    path = ".".join(str(part) for part in location[1:])[:MAX_PATH_CHARS]
    match kind:
        case "missing":
            reason = "is required"
        case "extra_forbidden":
            reason = "is not a parameter of this endpoint; remove it"
        case "unsupported" | "value":
            reason = str(error["msg"])
        case "model_type" | "model_attributes_type":
            reason = "must be an object" + _quoted(given)
        case "string_unicode":
            reason = "must be valid Unicode, but holds half of a surrogate pair"
        case _:
            reason = _must(str(error["msg"])) + _quoted(given)
    return Failure(400, f"{path}: {reason}", param=path, code=VALIDATION_CODES.get(kind, "invalid_value"))


def _context(error: Mapping[str, object]) -> str:
    context, location = error.get("ctx"), error["loc"]
    assert isinstance(context, Mapping)
    assert isinstance(location, Sequence)
    return f"{context['error']} at character {location[-1]}"


def _must(message: str) -> str:
    """pydantic's sentence with the parameter as its subject."""
    return re.sub("^(Input|List|String|Dictionary) should", "must", message).replace(" after validation", "")


def _quoted(given: object) -> str:
    """The value at fault, if it is a short one."""
    is_short = isinstance(given, bool | int | float | str) and len(text := json.dumps(given)) <= 40
    return f" (got {text})" if is_short else ""
