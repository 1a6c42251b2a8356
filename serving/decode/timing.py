"""When each request was submitted, admitted, answered first and ended: plain numbers, kept beside the loop."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from serving.decode.stats import EngineStats
from serving.requests import Chunk, GenerationRequest
from serving.types import FinishReason

Part = Literal["ingress", "queue", "draft", "verify"]

MAX_KEPT = 8192


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """An ended request on one engine. Moments are seconds of time.monotonic, None where it never got there.

    `ingress_s` is what passed between the gateway's receipt and the submission, 0 where no gateway said when;
    `draft_s` the engine's time in drafters between admission and the first token. A resumed request was
    received, and may have had its first token, elsewhere.
    """

    reason: FinishReason
    ingress_s: float
    submitted_s: float
    admitted_s: float | None
    first_token_s: float | None
    finished_s: float
    draft_s: float
    num_tokens: int
    is_resumed: bool

    @property
    def first_token_parts(self) -> dict[Part, float]:
        """Seconds to the first token by where they went; they add up. Empty where there was no first token here."""
        if self.admitted_s is None or self.first_token_s is None or self.is_resumed:
            return {}
        computed_s = self.first_token_s - self.admitted_s
        draft_s = min(self.draft_s, computed_s)
        return {
            "ingress": self.ingress_s,
            "queue": self.admitted_s - self.submitted_s,
            "draft": draft_s,
            "verify": computed_s - draft_s,
        }

    @property
    def is_complete(self) -> bool:
        """It ended by itself, so its length and its latency say something."""
        return self.reason in ("stop", "length")

    @property
    def latency_s(self) -> float:
        """From the receipt to the end."""
        return self.ingress_s + self.finished_s - self.submitted_s

    @property
    def token_s(self) -> float | None:
        """Mean seconds a token after the first; None below two tokens."""
        if self.first_token_s is None or self.num_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.num_tokens - 1)


@dataclass
class _Life:
    ingress_s: float
    submitted_s: float
    is_resumed: bool
    admitted_s: float | None = None
    first_token_s: float | None = None
    draft_s: float = 0.0
    num_tokens: int = 0

    def ended(self, reason: FinishReason) -> RequestTimes:
        return RequestTimes(
            reason=reason,
            ingress_s=self.ingress_s,
            submitted_s=self.submitted_s,
            admitted_s=self.admitted_s,
            first_token_s=self.first_token_s,
            finished_s=time.monotonic(),
            draft_s=self.draft_s,
            num_tokens=self.num_tokens,
            is_resumed=self.is_resumed,
        )


class RequestLog:
    """Watches requests on their way through one engine. Whoever wants their times drains them.

    At most MAX_KEPT are kept for that; older ones are dropped. Requests that are not watched cost nothing.
    """

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._lives: dict[str, _Life] = {}
        self._ended: deque[RequestTimes] = deque(maxlen=MAX_KEPT)

    def watch(self, request: GenerationRequest, sink: Callable[[Chunk], None]) -> Callable[[Chunk], None]:
        """`sink`, timed. To be called when the request is submitted, from any thread."""
        since_s = 0.0 if request.received_s is None else time.time() - request.received_s
        # Two machines' clocks may differ by more than a request takes to get here.
        life = _Life(max(0.0, since_s), time.monotonic(), is_resumed=request.is_resumed)
        self._lives[request.request_id] = life

        def deliver(chunk: Chunk) -> None:
            self._note(life, chunk)
            sink(chunk)

        return deliver

    def admit(self, request_id: str) -> None:
        """A place was found for the request. Engine thread."""
        life = self._lives.get(request_id)
        if life is not None:
            life.admitted_s = time.monotonic()
            life.draft_s = -self._stats.draft_wait_s

    def drain(self) -> list[RequestTimes]:
        """What has ended since the last call. Any thread, but one at a time."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def _note(self, life: _Life, chunk: Chunk) -> None:
        if chunk.ids and life.first_token_s is None:
            life.first_token_s = time.monotonic()
            life.draft_s += self._stats.draft_wait_s
        life.num_tokens += len(chunk.ids)
        if chunk.finish_reason is not None:
            self._lives.pop(chunk.request_id, None)
            self._ended.append(life.ended(chunk.finish_reason))
