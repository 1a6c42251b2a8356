"""A real HTTP server on a free port, in a thread, around any ASGI application."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from jobs.load import Request
from tests.api.scripted import chat_body


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """The URL of `app`, up; stopped at the end."""
    config = uvicorn.Config(app, port=0, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def chat_request(name: str = "p") -> Request:
    """A streamed chat of at most 16 tokens."""
    return Request(name, chat_body(max_tokens=16, stream=True, stream_options={"include_usage": True}))


@dataclass(frozen=True)
class RawEvents:
    """One model, and a stream of exactly these lines for every request, in pieces of `piece` bytes."""

    lines: Sequence[str]
    status: int = 200
    piece: int = 1 << 20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/models":
            status, body = 200, json.dumps({"data": [{"id": "raw"}]})
        else:
            status, body = self.status, "".join(f"{line}\n\n" for line in self.lines)
        await send({"type": "http.response.start", "status": status, "headers": []})
        whole = body.encode()
        for start in range(0, len(whole), self.piece):
            await send({"type": "http.response.body", "body": whole[start : start + self.piece], "more_body": True})
        await send({"type": "http.response.body"})
