"""What one request has been given so far: the text, the count that usage states, the receipt."""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from serving.api.connection import closed_after
from serving.api.errors import RETRY_AFTER_S, ApiError, Failure
from serving.api.responses import FinishReason, SpeculationReceipt, Usage
from serving.types import Chunk, Receipt


class GenerationFailedError(Exception):
    """The engine ended a request without an answer; its own log says why."""


@dataclass
class Delivery:
    """The tally of one request's chunks. Mutable: grows with `add`."""

    completion_id: str
    num_prompt_tokens: int
    num_tokens: int = 0
    receipt: Receipt = field(default_factory=Receipt)
    finish_reason: FinishReason | None = None
    _texts: list[str] = field(default_factory=list)

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

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def ended_as(self) -> FinishReason:
        """The finish reason of a request that is complete. Raises when its chunks ran out before."""
        if self.finish_reason is None:
            raise GenerationFailedError
        return self.finish_reason

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_tokens,
            total_tokens=self.num_prompt_tokens + self.num_tokens,
        )

    @property
    def speculation(self) -> SpeculationReceipt:
        return SpeculationReceipt.of(self.receipt)


async def counted(chunks: AsyncIterator[Chunk], delivery: Delivery) -> AsyncGenerator[Chunk, None]:
    """`chunks` up to the one that ends the request, each added to `delivery`; raises if they end otherwise.

    The source is closed when this ends or is closed.
    """
    async with closed_after(chunks):
        async for chunk in chunks:
            delivery.add(chunk)
            yield chunk
            if delivery.finish_reason is not None:
                return
    raise GenerationFailedError


async def exhausted(chunks: AsyncIterator[Chunk]) -> None:
    """Take `chunks` to their end."""
    async for _ in chunks:
        continue


def _cancelled() -> Failure:
    message = f"The request was cancelled because its server is stopping; send it again in {RETRY_AFTER_S} s."
    return Failure(503, message, "server_error", code="cancelled", retry_after_s=RETRY_AFTER_S)
