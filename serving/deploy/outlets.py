"""A Target's half of its channels: what is ready for all requests of one Gateway leaves in one frame. No Ray.

Rounds gather, and are joined, while a connection takes no frame and until the period of its `pace` is over: each piece
of a stream costs time of cores that the model may need. A request's first chunk and its last are never held back.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from socket import socket as Socket

from serving.deploy.joining import joined
from serving.deploy.pace import Pace
from serving.deploy.wire import NAME_BYTES, Address, ChannelLostError, frame_of, listener, notice_silence
from serving.requests import Chunk
from serving.types import FinishReason

log = logging.getLogger("ray.serve")

# More than a Gateway takes to hear of a Target and connect; one that has died in between never does.
CONNECT_S = 30.0
_AT_ONCE = Pace()


class Departure:
    """One request on its way out: its tokens that have left, and how it ended once its last chunk has."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._is_over = asyncio.Event()

    @property
    def is_lost(self) -> bool:
        """Whether nothing that is ready for it may leave: what came before may be gone."""
        return self._is_over.is_set() and self.finish_reason is None

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
        if self.is_lost:
            raise ChannelLostError


class Outlet:
    """What is ready for one Gateway. `put` may be called from any thread, the rest belongs to the event loop.

    A departure is lost where the Gateway has not connected within `connect_s`. `on_idle` is called once there is
    neither departure nor connection any more.
    """

    def __init__(
        self, on_idle: Callable[[], object] = lambda: None, *, pace: Pace = _AT_ONCE, connect_s: float = CONNECT_S
    ) -> None:
        self._on_idle = on_idle
        self._pace = pace
        self._connect_s = connect_s
        self._loop = asyncio.get_running_loop()
        self._chunks: deque[Chunk] = deque()
        self._departures: dict[str, Departure] = {}
        self._ready = asyncio.Event()
        self._urgent = asyncio.Event()
        self._is_woken = False
        self._is_hurried = False
        self._sending: asyncio.Task[None] | None = None

    @contextmanager
    def departure(self, request_id: str) -> Iterator[Departure]:
        """Let a request's chunks pass while the block lasts; those that come later are dropped. Names are unique."""
        departure = self._departures[request_id] = Departure()
        waiting = self._loop.call_later(self._connect_s, self._lose_unconnected, departure)
        try:
            yield departure
        finally:
            waiting.cancel()
            del self._departures[request_id]
            self._tell_if_idle()

    def put(self, chunk: Chunk) -> None:
        """Send `chunk` once the period is over, a request's first or last at once."""
        self._chunks.append(chunk)
        if self._loop.is_closed():
            return
        if self._pace.most_s and _is_urgent(chunk) and not self._is_hurried:
            self._is_hurried = True
            self._loop.call_soon_threadsafe(self._urgent.set)  # before it is woken: afterwards this may come too late
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._ready.set)

    def disconnect(self) -> None:
        """End the connection, if there is one; every departure is lost with it."""
        if self._sending is None:
            return
        self._sending.cancel()
        self._sending = None
        for departure in self._departures.values():
            departure.lose()

    async def send_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send until the connection breaks or another one takes its place."""
        self.disconnect()  # before the other one begins: it must not carry the rest of what this one has lost
        sending = self._sending = asyncio.ensure_future(self._send_all(writer))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._sending is sending:
                self.disconnect()
                self._tell_if_idle()
            gone.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)

    def _lose_unconnected(self, departure: Departure) -> None:
        if self._sending is None:
            departure.lose()

    def _tell_if_idle(self) -> None:
        if not self._departures and self._sending is None:
            self._on_idle()

    async def _send_all(self, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=0)  # what is drained is the kernel's, and survives this process
        sent_s = float("-inf")
        while True:
            await self._ready.wait()
            is_due = await self._is_due(sent_s + self._pace.period_s(self._num_streams))
            chunks = self._take(only_urgent=not is_due)
            if chunks:
                sent_s = self._loop.time() if is_due else sent_s
                writer.write(frame_of(chunks))
                await writer.drain()
            for chunk in chunks:
                if (departure := self._departures.get(chunk.request_id)) is not None:
                    departure.sent(chunk)

    @property
    def _num_streams(self) -> int:
        """Requests that have begun."""
        return sum(departure.num_tokens > 0 for departure in self._departures.values())

    async def _is_due(self, due_s: float) -> bool:
        """Wait until `due_s` on the loop's clock: True; or for what is urgent before: False."""
        if self._loop.time() < due_s:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._urgent.wait()
                    return False
        return True

    def _take(self, *, only_urgent: bool) -> list[Chunk]:
        """What is ready of requests that are still wanted and whole, one chunk each."""
        self._ready.clear()
        self._urgent.clear()
        self._is_woken = self._is_hurried = False  # before looking: a chunk that comes now wakes again
        ready: dict[str, list[Chunk]] = {}
        for _ in range(len(self._chunks)):
            chunk = self._chunks.popleft()
            departure = self._departures.get(chunk.request_id)
            if departure is not None and not departure.is_lost:
                ready.setdefault(chunk.request_id, []).append(chunk)
        if only_urgent:
            ready = self._urgent_of(ready)
        return [joined(chunks) for chunks in ready.values()]

    def _urgent_of(self, ready: dict[str, list[Chunk]]) -> dict[str, list[Chunk]]:
        """The requests with an urgent chunk; what is ready of others goes back to where it was."""
        waiting = [chunk for chunks in ready.values() if not any(map(_is_urgent, chunks)) for chunk in chunks]
        self._chunks.extendleft(reversed(waiting))
        if waiting:
            self._ready.set()
        return {name: chunks for name, chunks in ready.items() if any(map(_is_urgent, chunks))}


def _is_urgent(chunk: Chunk) -> bool:
    """Whether it is a request's first or last."""
    return chunk.finish_reason is not None or chunk.receipt.emitted <= len(chunk.ids)


class Outlets:
    """The outlets of one Target by the names of their Gateways, behind one port. Made within the event loop."""

    def __init__(self, host: str, *, pace: Pace = _AT_ONCE) -> None:
        socket = listener(host)
        self._pace = pace
        self.address: Address = socket.getsockname()[:2]
        self._outlets: dict[bytes, Outlet] = {}
        self._serving = asyncio.get_running_loop().create_task(self._serve(socket))

    def outlet(self, gateway: bytes) -> Outlet:
        """The outlet to the Gateway of that name, which may connect from now on until it is idle."""
        if gateway not in self._outlets:
            forget = partial(self._outlets.pop, gateway, None)
            self._outlets[gateway] = Outlet(forget, pace=self._pace)
        return self._outlets[gateway]

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
        except (OSError, EOFError) as error:
            log.info("a connection ended before it began: %s", type(error).__name__)
        finally:
            writer.close()
