"""An answer as server-sent events. The response waits until every choice has begun, so that a refusal is a status."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serving.api.connection import ClientLeftError, closed_after, while_connected
from serving.api.delivery import Delivery
from serving.api.errors import failure_of
from serving.api.framing import Framing, streamed, usage_frame
from serving.api.record import RequestRecord
from serving.api.responses import Frame
from serving.api.tally import Tally

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Answer:
    """Choices under way: `grown` has a choice's delivery whenever it has grown, each after it has begun."""

    grown: AsyncGenerator[Delivery, None]
    framing: Framing
    tally: Tally
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
    try:
        async with closed_after(answer.grown):
            for delivery in answer.tally.deliveries:
                for frame in [*answer.framing.opening(delivery.index), *streamed(answer.framing, delivery)]:
                    yield _event(frame, answer)
            async for delivery in answer.grown:
                for frame in streamed(answer.framing, delivery):
                    yield _event(frame, answer)
        if answer.wants_usage:
            yield _event(usage_frame(answer.framing, answer.tally), answer)
        yield DONE
    except Exception as error:  # noqa: BLE001 - the status is out: whatever it is, the client must hear of it here
        answer.record.fail(error)
        yield _data(failure_of(error, request_id=answer.record.request_id).body)


def _event(frame: Frame, answer: Answer) -> bytes:
    """One event; with include_usage every frame has the field, null but on the last."""
    if answer.wants_usage and frame.usage is None:
        frame = frame.model_copy(update={"usage": None})
    return _data(frame.model_dump_json(exclude_unset=True))


def _data(json_text: str) -> bytes:
    return f"data: {json_text}\n\n".encode()
