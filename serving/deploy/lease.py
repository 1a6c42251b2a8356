"""Keeping a lease on one replica of another deployment: acquired, renewed in time, replaced on death.

A replica's own handle exposes Serve's methods only, so a lease hands out an actor that the replica owns. It
is one streaming call: its first item is the grant, the rest are heartbeats. It ends by itself after LEASE_S,
so that a replica that is being scaled down can drain; the actor serves on until the next grant.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

log = logging.getLogger("ray.serve")

LEASE_S = 30.0
HEARTBEAT_S = 1.0
_MISSED_HEARTBEATS_S = 10.0
_RETRY_S = 0.5


@dataclass(frozen=True)
class Grant:
    """The leased actor, and the name of its process."""

    actor: ActorHandle[Any]
    incarnation: str


class LeaseStream(Protocol):
    """What a streaming call of `lease` returns."""

    def __aiter__(self) -> AsyncIterator[Grant | None]: ...

    def __anext__(self) -> Awaitable[Grant | None]: ...

    def cancel(self) -> None: ...


class LeaseKeeper:
    """Holds one lease at a time in a task of the running event loop.

    `on_grant` gets each grant, and None where a lease ended before its time.
    """

    def __init__(
        self,
        open_lease: Callable[[], LeaseStream],
        on_grant: Callable[[Grant | None], None],
        *,
        on_beat: Callable[[], None] = lambda: None,
        retry_s: float = _RETRY_S,
    ) -> None:
        self._open_lease = open_lease
        self._on_grant = on_grant
        self._on_beat = on_beat
        self._retry_s = retry_s
        self._lost = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, from within the event loop that the lease will live in."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())

    def replace(self) -> None:
        """The leased actor is gone: ask for another one now. Any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._lost.set)

    def stop(self) -> None:
        """Give the lease back."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            self._lost.clear()
            stream = self._open_lease()
            try:
                await self._hold(stream)
            except (RayError, RayServeException, TimeoutError) as error:
                log.warning("lease: %s; asking for another", type(error).__name__)
                self._on_grant(None)
                await asyncio.sleep(self._retry_s)
            finally:
                stream.cancel()

    async def _hold(self, stream: LeaseStream) -> None:
        """Returns when the lease runs out or its actor is reported lost; raises when its replica dies."""
        try:
            grant = await anext(stream)  # for as long as it takes: a replica may have to start first
            assert grant is not None
            self._on_grant(grant)
            while not self._lost.is_set():
                await self._next_or_lost(stream)
                self._on_beat()
        except StopAsyncIteration:
            return

    async def _next_or_lost(self, stream: LeaseStream) -> None:
        beat = asyncio.ensure_future(anext(stream))
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            done, _ = await asyncio.wait(
                (beat, lost), timeout=_MISSED_HEARTBEATS_S, return_when=asyncio.FIRST_COMPLETED
            )
            if beat in done:
                beat.result()
            elif not done:
                raise TimeoutError
        finally:
            beat.cancel()
            lost.cancel()
