"""A Target's half of its channels: what a round gives to all requests of one Gateway leaves in one frame. No Ray.

While a connection takes frames each round leaves at once; while it does not, rounds gather and are joined.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket as Socket

from serving.deploy.flushing import joined
from serving.deploy.wire import NAME_BYTES, Address, ChannelLostError, frame_of, listener, notice_silence
from serving.requests import Chunk
from serving.types import FinishReason

log = logging.getLogger("ray.serve")


class Departure:
    """One request on its way out: its tokens that have left, and how it ended once its last chunk has."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._is_over = asyncio.Event()

    def sent(self, chunk: Chunk) -> None:
        self.num_tokens += len(chunk.ids)
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            self._is_over.set()

    def lose(self) -> None:
        """Chunks may have been lost on their way."""
        self._is_over.set()

    async def complete(self) -> None:
        """Wait until the last chunk has left. Raises ChannelLostError where chunks may have been lost."""
        await self._is_over.wait()
        if self.finish_reason is None:
            raise ChannelLostError


class Outlet:
    """What is ready for one Gateway. `put` may be called from any thread, the rest belongs to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[Chunk] = deque()
        self._departures: dict[str, Departure] = {}
        self._ready = asyncio.Event()
        self._is_woken = False
        self._sending: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        return not self._departures and self._sending is None

    @contextmanager
    def departure(self, request_id: str) -> Iterator[Departure]:
        """Let a request's chunks pass while the block lasts; those that come later are dropped. Names are unique."""
        departure = self._departures[request_id] = Departure()
        try:
            yield departure
        finally:
            del self._departures[request_id]

    def put(self, chunk: Chunk) -> None:
        """Send `chunk` as soon as possible, in one frame with whatever is ready by then."""
        self._chunks.append(chunk)
        if not self._is_woken and not self._loop.is_closed():
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._ready.set)

    def disconnect(self) -> None:
        """End the connection, if there is one."""
        if self._sending is not None:
            self._sending.cancel()

    async def send_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send until the connection breaks or another one takes its place; then every departure is lost."""
        self.disconnect()
        sending = self._sending = asyncio.ensure_future(self._send_all(writer))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            gone.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            if self._sending is sending:
                self._sending = None
            for departure in self._departures.values():
                departure.lose()

    async def _send_all(self, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=0)  # what is drained is the kernel's, and survives this process
        while True:
            await self._ready.wait()
            chunks = self._take()
            if chunks:
                writer.write(frame_of(chunks))
                await writer.drain()
            for chunk in chunks:
                if (departure := self._departures.get(chunk.request_id)) is not None:
                    departure.sent(chunk)

    def _take(self) -> list[Chunk]:
        """All that is ready of requests that are still wanted, one chunk each."""
        self._ready.clear()
        self._is_woken = False  # before looking: a chunk that comes now wakes again
        ready: dict[str, list[Chunk]] = {}
        for _ in range(len(self._chunks)):
            chunk = self._chunks.popleft()
            if chunk.request_id in self._departures:
                ready.setdefault(chunk.request_id, []).append(chunk)
        return [joined(chunks) for chunks in ready.values()]


class Outlets:
    """The outlets of one Target by the names of their Gateways, behind one port. Made within the event loop."""

    def __init__(self, host: str) -> None:
        socket = listener(host)
        self.address: Address = socket.getsockname()[:2]
        self._outlets: dict[bytes, Outlet] = {}
        self._serving = asyncio.get_running_loop().create_task(self._serve(socket))

    def outlet(self, gateway: bytes) -> Outlet:
        """The outlet to the Gateway of that name, which may connect from now on."""
        return self._outlets.setdefault(gateway, Outlet())

    def close(self) -> None:
        """End all connections, and take no more."""
        self._serving.cancel()
        for outlet in self._outlets.values():
            outlet.disconnect()

    async def _serve(self, socket: Socket) -> None:
        async with await asyncio.start_server(self._connected, sock=socket) as server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            gateway = await reader.readexactly(NAME_BYTES)
            if (outlet := self._outlets.get(gateway)) is not None:
                notice_silence(writer)
                await outlet.send_to(reader, writer)
                if outlet.is_idle:
                    self._outlets.pop(gateway, None)
        except (OSError, EOFError) as error:
            log.info("a connection ended before it began: %s", type(error).__name__)
        finally:
            writer.close()
