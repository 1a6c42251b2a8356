"""An answer as server-sent events. The response waits for the first chunk, so that a refusal is a status."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serving.api.connection import ClientLeftError, closed_after, while_connected
from serving.api.delivery import Delivery
from serving.api.errors import failure_of
from serving.api.record import RequestRecord
from serving.api.responses import Frame
from serving.types import Chunk

DONE = b"data: [DONE]\n\n"


class Framing(Protocol):
    """How one endpoint dresses what was delivered."""

    def opening(self) -> Sequence[Frame]:
        """What comes before the first text."""
        ...

    def delta(self, text: str) -> Frame: ...

    def closing(self, delivery: Delivery) -> Frame:
        """The chunk with the finish reason and the receipt."""
        ...

    def whole(self, delivery: Delivery) -> BaseModel:
        """The answer in one piece."""
        ...


@dataclass(frozen=True)
class Answer:
    """One generation under way: its counted chunks, how they are dressed, and what was delivered."""

    chunks: AsyncGenerator[Chunk, None]
    framing: Framing
    delivery: Delivery
    record: RequestRecord
    wants_usage: bool = False


class EventStream(StreamingResponse):
    """Server-sent events of an answer that has begun; its source is closed the moment the client leaves."""

    def __init__(self, answer: Answer) -> None:
        self._events = events(answer)
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._events, headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except OSError:  # some servers tell by a send that fails
            raise ClientLeftError from None

    async def _send_all(self, send: Send) -> None:
        async with closed_after(self._events):
            await self.stream_response(send)


async def events(answer: Answer) -> AsyncGenerator[bytes, None]:
    """The answer frame by frame, what has been delivered by now first. A failure becomes one error event."""
    framing, delivery = answer.framing, answer.delivery
    try:
        async with closed_after(answer.chunks):
            for frame in [*framing.opening(), *_deltas(framing, delivery.text)]:
                yield _event(frame, answer)
            async for chunk in answer.chunks:
                for frame in _deltas(framing, chunk.text):
                    yield _event(frame, answer)
        yield _event(framing.closing(delivery), answer)
        if answer.wants_usage:
            last = framing.delta("").model_copy(update={"choices": [], "usage": delivery.usage})
            yield _event(last, answer)
        yield DONE
    except Exception as error:  # noqa: BLE001 - the status is out: whatever it is, the client must hear of it here
        answer.record.fail(error)
        yield _data(failure_of(error, request_id=answer.record.request_id).body)


def _deltas(framing: Framing, text: str) -> list[Frame]:
    """No frame for a round whose text is still undecided."""
    return [framing.delta(text)] if text else []


def _event(frame: Frame, answer: Answer) -> bytes:
    """One event; with include_usage every frame has the field, null but on the last."""
    if answer.wants_usage and frame.usage is None:
        frame = frame.model_copy(update={"usage": None})
    return _data(frame.model_dump_json(exclude_unset=True))


def _data(json_text: str) -> bytes:
    return f"data: {json_text}\n\n".encode()
