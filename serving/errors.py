"""What can go wrong, as the user sees it.

    DrafthouseError                 one sentence: the field, the constraint, the value, what to do
    ├── ConfigError                 a profile or a flag is wrong: one line and exit status 2
    ├── ModelError                  a model cannot be fetched, loaded or run here
    ├── MemoryPlanError             weights and KV do not fit; carries the table
    ├── RequestError                a request is wrong: HTTP 400, names the field
    └── OverloadedError             no room now: HTTP 429 with Retry-After

Every error is built from its message alone (RequestError: field and message), so it survives pickling
on its way through Ray.
"""

import yaml
from pydantic import ValidationError


class DrafthouseError(Exception):
    """Base of every error a user is meant to read."""


class ConfigError(DrafthouseError):
    """A profile, a config file or a command-line flag is wrong."""


class ModelError(DrafthouseError):
    """A model cannot be fetched, loaded or run on this machine."""


class MemoryPlanError(DrafthouseError):
    """The planned weights, KV rows and workspace exceed the memory there is."""


class RequestError(DrafthouseError):
    """A request cannot be served as asked; `field` names the offending parameter."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class OverloadedError(DrafthouseError):
    """The queue is full; try again after a short while."""


def one_line(error: ValidationError | yaml.YAMLError) -> str:
    """The first complaint of `error`, with the field it is about."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        return f"{where}: {first['msg']} (got {repr(first['input'])[:80]})"
    return " ".join(str(error).split())
