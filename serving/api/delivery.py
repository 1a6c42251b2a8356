"""What one choice has been given: its text and log probabilities until they are taken, its counts, its receipt."""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from serving.api.connection import closed_after
from serving.api.errors import RETRY_AFTER_S, ApiError, Failure
from serving.api.responses import FinishReason
from serving.requests import Chunk, Receipt
from serving.types import ExceptionRecord, Tier, TokenLogprob


class GenerationFailedError(Exception):
    """The engine ended a request without an answer; its own log says why."""


@dataclass(frozen=True)
class Delta:
    """What was added to one choice. `logprobs` has one entry a token, or is None where none were asked for.

    Text may lag the tokens: what is undecided yet comes with a later delta, its log probabilities with this one.
    """

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None

    def __bool__(self) -> bool:
        """Whether there is anything for a client to append."""
        return bool(self.text or self.logprobs)

    @property
    def ended_as(self) -> FinishReason:
        """The finish reason of a choice that is complete."""
        assert self.finish_reason is not None, "a whole choice has ended"
        return self.finish_reason


@dataclass
class Delivery:
    """The tally of one choice's chunks. Mutable: grows with `add`, and `take` hands each thing out once.

    `echo` is text that comes before the choice's own.
    """

    index: int
    num_prompt_tokens: int
    wants_logprobs: bool = False
    wants_tiers: bool = False
    echo: str = ""
    num_tokens: int = 0
    receipt: Receipt | None = None
    finish_reason: FinishReason | None = None
    exceptions: list[ExceptionRecord] = field(default_factory=list)
    tiers: list[Tier] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _is_finish_taken: bool = False

    def __post_init__(self) -> None:
        self._texts.append(self.echo)

    @property
    def has_begun(self) -> bool:
        return self.receipt is not None

    def add(self, chunk: Chunk) -> None:
        """Count one chunk. Raises when it says that the request failed or was cancelled."""
        match chunk.finish_reason:
            case "error":
                raise GenerationFailedError
            case "cancelled":
                raise ApiError(_cancelled())
            case reason:
                self.finish_reason = reason
        self.num_tokens += len(chunk.ids)
        self.receipt = chunk.receipt
        self._texts.append(chunk.text)
        self._logprobs += chunk.logprobs or ()
        self.exceptions += chunk.exceptions
        self.tiers += chunk.tiers

    def take(self) -> Delta:
        """All that was added and not taken before."""
        text, logprobs = "".join(self._texts), tuple(self._logprobs)
        finish_reason = None if self._is_finish_taken else self.finish_reason
        self._texts.clear()
        self._logprobs.clear()
        self._is_finish_taken = self.finish_reason is not None
        return Delta(self.index, text, logprobs if self.wants_logprobs else None, finish_reason)


async def counted(chunks: AsyncIterator[Chunk], delivery: Delivery) -> AsyncGenerator[Delivery, None]:
    """`delivery` after each chunk, up to the one that ends the request; raises if they end otherwise.

    The source is closed when this ends or is closed.
    """
    async with closed_after(chunks):
        async for chunk in chunks:
            delivery.add(chunk)
            yield delivery
            if delivery.finish_reason is not None:
                return
    raise GenerationFailedError


def _cancelled() -> Failure:
    message = f"The request was cancelled because its server is stopping; send it again in {RETRY_AFTER_S} s."
    return Failure(503, message, "server_error", code="cancelled", retry_after_s=RETRY_AFTER_S)
