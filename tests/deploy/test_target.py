"""A request's life at a Target's door: admitted or refused, counted, cancelled."""

import asyncio
import threading

import pytest

from serving.config import EngineConfig
from serving.deploy.outlets import Outlet
from serving.deploy.pace import pace_of
from serving.deploy.target import admitted
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


class Writer:
    """Takes every frame at once."""

    transport = property(lambda self: self)

    def set_write_buffer_limits(self, high): ...

    def write(self, data): ...

    async def drain(self): ...


@pytest.fixture
async def outlet():
    outlet = Outlet()
    connection = asyncio.create_task(outlet.send_to(asyncio.StreamReader(), Writer()))
    yield outlet
    connection.cancel()


@pytest.mark.parametrize(
    ("given_ms", "device", "periods_s"),
    [
        (None, "cpu", [0.1, 0.1, 0.2, 0.25]),
        (None, "cuda", [0.0] * 4),
        (0.0, "cpu", [0.0] * 4),
        (80, "cuda", [0.08] * 4),
    ],
)
def test_streams_are_paced_where_they_take_time_of_the_models_cores(given_ms, device, periods_s):
    pace = pace_of(EngineConfig(stream_period_ms=given_ms), device)
    assert [pace.period_s(streams) for streams in (1, 4, 8, 32)] == periods_s


async def test_a_request_that_comes_to_its_end_is_not_cancelled(outlet):
    engine = ScriptedEngine(num_chunks=50, ends=True)
    with admitted(engine, request(PLAIN), outlet) as departure:
        await departure.complete()
    assert (departure.num_tokens, departure.finish_reason, engine.cancelled) == (50, "length", [])


async def test_a_refusal_is_raised_before_the_request_is_in(outlet):
    engine = ScriptedEngine(num_chunks=1, ends=True, refuses=True)
    with pytest.raises(OverloadedError), admitted(engine, request(PLAIN), outlet):
        raise AssertionError("it is in")
    assert engine.cancelled == []


async def test_a_caller_that_is_cancelled_while_waiting_cancels_the_request(outlet):
    engine = ScriptedEngine(num_chunks=1, ends=False)

    async def wait():
        with admitted(engine, request(PLAIN), outlet) as departure:
            await departure.complete()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.cancelled == ["r"]
