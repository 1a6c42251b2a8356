"""A Gateway's half of its channels: one connection to each Target that it has requests at. No Ray."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from serving.deploy.joining import joined
from serving.deploy.wire import Address, ChannelLostError, new_name, notice_silence, read_frame
from serving.requests import Chunk

log = logging.getLogger("ray.serve")

_CONNECT_S = 5.0


class Inbox:
    """Chunks of one request that have come in and were not taken, until it fails."""

    def __init__(self) -> None:
        self.source: Address | None = None
        self._chunks: list[Chunk] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._changed.set()

    async def take(self) -> Chunk:
        """All that has come in, as one chunk; waits for the first. Raises the error once nothing is left."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        chunks, self._chunks = self._chunks, []
        return joined(chunks)


class Inlets:
    """The inboxes of one Gateway, and the connections that fill them."""

    def __init__(self) -> None:
        self.name = new_name()
        self._inboxes: dict[str, Inbox] = {}
        self._connections: dict[Address, asyncio.Task[None]] = {}

    @contextmanager
    def inbox(self, request_id: str) -> Iterator[Inbox]:
        """Open before the request is sent: its first chunks may come before the answer to its call."""
        inbox = self._inboxes[request_id] = Inbox()
        try:
            yield inbox
        finally:
            del self._inboxes[request_id]

    def connect(self, inbox: Inbox, source: Address) -> None:
        """Have `inbox` fail with ChannelLostError where the Target at `source` is lost, or cannot be reached."""
        inbox.source = source
        if source not in self._connections:
            self._connections[source] = asyncio.create_task(self._receive(source))

    async def _receive(self, source: Address) -> None:
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(*source), _CONNECT_S)
            try:
                notice_silence(writer)
                writer.write(self.name)
                while True:
                    self._deliver(await read_frame(reader))
            finally:
                writer.close()
        except (OSError, EOFError) as error:
            log.warning("the connection to the Target at %s:%d ended: %s", *source, type(error).__name__)
        finally:
            del self._connections[source]
            for inbox in self._inboxes.values():
                if inbox.source == source:
                    inbox.fail(ChannelLostError())

    def _deliver(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if (inbox := self._inboxes.get(chunk.request_id)) is not None:  # else its client has left
                inbox.put(chunk)
