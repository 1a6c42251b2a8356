"""From the engine's thread to the replica's event loop and back."""

import asyncio
import threading

import pytest

from serving.deploy.target import stream
from serving.errors import OverloadedError
from serving.requests import Chunk, Receipt
from tests.deploy.replicas import request

PLAIN = "plain text"


class ScriptedEngine:
    """Delivers chunks from a thread of its own, as the engine does; then nothing more."""

    def __init__(self, *, num_chunks, ends, refuses=False):
        reasons = [None] * (num_chunks - 1) + ["length" if ends else None]
        self._chunks = [Chunk("r", (i,), str(i), Receipt(), finish_reason=r) for i, r in enumerate(reasons)]
        self._refuses = refuses
        self.cancelled = []

    def submit(self, asked, sink):
        if self._refuses:
            raise OverloadedError("full")
        threading.Thread(target=lambda: [sink(chunk) for chunk in self._chunks]).start()

    def cancel(self, request_id):
        self.cancelled.append(request_id)


async def test_every_chunk_arrives_in_order_and_nothing_is_cancelled():
    engine = ScriptedEngine(num_chunks=50, ends=True)
    assert [c.ids[0] async for c in stream(engine, request(PLAIN))] == list(range(50))
    assert engine.cancelled == []


async def test_a_refusal_is_raised_before_the_first_chunk():
    engine = ScriptedEngine(num_chunks=1, ends=True, refuses=True)
    with pytest.raises(OverloadedError):
        await anext(stream(engine, request(PLAIN)))
    assert engine.cancelled == []


async def test_closing_the_stream_cancels_the_request():
    engine = ScriptedEngine(num_chunks=3, ends=False)
    chunks = stream(engine, request(PLAIN))
    await anext(chunks)
    await chunks.aclose()
    assert engine.cancelled == ["r"]


async def test_a_caller_that_is_cancelled_while_waiting_cancels_the_request():
    engine = ScriptedEngine(num_chunks=1, ends=False)

    async def consume():
        async for _ in stream(engine, request(PLAIN)):
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.cancelled == ["r"]
