"""A client that leaves frees its request at once, whatever it was waiting for (case 32)."""

import asyncio
import json

import pytest

from serving.api.gateway import create_app
from tests.api.scripted import HANG, ScriptedBackend, chunk, text_body


class Connection:
    """One request to an ASGI app, with a client that can leave when it likes."""

    def __init__(self, body: dict[str, object]) -> None:
        self._incoming = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        self.sent: list[dict[str, object]] = []
        self.begun = asyncio.Event()
        self.send_blocks = False

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def run(self, app) -> None:
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
            "query_string": b"", "headers": [(b"content-type", b"application/json")], "root_path": "",
            "http_version": "1.1", "scheme": "http", "client": None, "server": None,
        }  # fmt: skip
        await app(scope, self._incoming.get, self._send)

    async def _send(self, message) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.begun.set()
            if self.send_blocks:
                await asyncio.Event().wait()


async def leave_when(connection, event, backend):
    """Run the request, leave at `event`, and return when the gateway is done with it."""
    running = asyncio.create_task(connection.run(create_app(backend)))
    await asyncio.wait_for(event.wait(), 5)
    assert backend.num_open == 1
    connection.leave()
    await asyncio.wait_for(running, 5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [[HANG], [chunk("a", 1), HANG]])
async def test_the_generator_is_closed_wherever_the_engine_was(stream, script, caplog):
    caplog.set_level("INFO", logger="serving")
    backend = ScriptedBackend(script)
    await leave_when(Connection(text_body(stream=stream)), backend.hanging, backend)
    assert backend.num_open == 0
    assert "outcome=disconnected" in caplog.text
    assert "ERROR" not in caplog.text


async def test_the_generator_is_closed_while_a_slow_client_is_being_sent_to():
    backend = ScriptedBackend([chunk("a", 1)] * 20)
    connection = Connection(text_body(stream=True))
    connection.send_blocks = True
    await leave_when(connection, connection.begun, backend)
    assert backend.num_open == 0


async def test_a_send_that_fails_counts_as_leaving(caplog):
    caplog.set_level("INFO", logger="serving")

    class Broken(Connection):
        async def _send(self, message):
            await super()._send(message)
            if message.get("body"):
                raise OSError("broken pipe")

    backend = ScriptedBackend([chunk("a", 1)] * 20)
    await Broken(text_body(stream=True)).run(create_app(backend))
    assert backend.num_open == 0
    assert "outcome=disconnected" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_the_server_s_own_cancel_closes_the_generator_too(stream):
    backend = ScriptedBackend([chunk("a", 1), HANG])
    running = asyncio.create_task(Connection(text_body(stream=stream)).run(create_app(backend)))
    await asyncio.wait_for(backend.hanging.wait(), 5)
    running.cancel()
    await asyncio.wait([running], timeout=5)
    assert (running.cancelled(), backend.num_open) == (True, 0)


async def test_a_client_that_leaves_while_sending_its_body_starts_nothing():
    backend = ScriptedBackend()
    connection = Connection({})
    connection._incoming = asyncio.Queue()
    connection.leave()
    await connection.run(create_app(backend))
    assert backend.requests == []


async def test_200_clients_that_leave_leave_nothing_behind():
    backend = ScriptedBackend([chunk("a", 1), HANG])
    app = create_app(backend)
    connections = [Connection(text_body(stream=number % 2 == 0)) for number in range(200)]
    running = [asyncio.create_task(connection.run(app)) for connection in connections]
    while backend.num_open < 200:
        await asyncio.sleep(0.01)
    for connection in connections:
        connection.leave()
    await asyncio.wait_for(asyncio.gather(*running), 20)
    assert backend.num_open == 0
