"""What the access log says about one request: ids, route, counts and times; never a prompt or an answer."""

import logging
import re
import time
import traceback
import uuid
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote

from starlette.types import Scope

from serving.api.tally import Tally

log = logging.getLogger(__name__)

Outcome = Literal["complete", "failed", "disconnected"]
_MAX_ENCODED_CHARS = 128
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


@dataclass
class RequestRecord:
    """Filled in while a request passes; one line when it has ended. `received_s` is in Unix time."""

    request_id: str
    status: int | None = None
    outcome: Outcome = "complete"
    tally: Tally | None = None
    received_s: float = field(default_factory=time.time)
    _started_s: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, scope: Scope) -> "RequestRecord":
        """The record that the outermost middleware has put on this request."""
        record: RequestRecord = scope["state"]["record"]
        return record

    def fail(self, error: Exception) -> None:
        """Log where `error` was raised: class and frames, but not its message, which may quote a prompt."""
        self.outcome = "failed"
        frames = "".join(traceback.format_tb(error.__traceback__))
        log.error("request_id=%s failed with %s\n%s", self.request_id, type(error).__name__, frames)

    def write(self, scope: Scope) -> None:
        """The access log line. The route is the template that matched, for a path may hold anything."""
        tally = self.tally
        log.info(
            "request_id=%s completion_id=%s method=%s route=%s status=%s outcome=%s duration_ms=%.1f "
            "prompt_tokens=%d completion_tokens=%d",
            self.request_id,
            tally.completion_id if tally else "-",
            scope["method"],
            getattr(scope.get("route"), "path", "-"),
            self.status or "-",
            self.outcome,
            (time.perf_counter() - self._started_s) * 1000.0,
            tally.num_prompt_tokens if tally else 0,
            tally.num_tokens if tally else 0,
        )


def request_id_from(header: str | None, *, is_answered: bool = False) -> str:
    """The client's id where it is harmless in a header and a log line, else a new one.

    One that is harmful and `is_answered` all the same, by a server in front of this one, is URL-encoded instead.
    """
    if header and _REQUEST_ID.fullmatch(header):
        return header
    return quote(header[:_MAX_ENCODED_CHARS], safe="") if header and is_answered else uuid.uuid4().hex
