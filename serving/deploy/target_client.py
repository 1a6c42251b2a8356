"""A Target deployment as its callers see it: one stream a request, whichever replicas it takes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

from ray.exceptions import RayTaskError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from serving.deploy.failover import generate_with_failover
from serving.deploy.inlets import Inbox, Inlets
from serving.deploy.status import TargetStatus
from serving.deploy.wire import Address
from serving.errors import DrafthouseError, OverloadedError
from serving.requests import Chunk, GenerationRequest


class TargetClient:
    """Calls a Target by its handle; errors arrive as themselves, not as Ray's."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._inlets = Inlets()

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """The chunks of `request`. Closing the iterator cancels it in every role."""
        return generate_with_failover(self._attempt, request)

    async def status(self) -> TargetStatus:
        """Of one replica, whichever is asked."""
        status: TargetStatus = await self._handle.status.remote()
        return status

    async def _attempt(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """One replica's stream. Serve's call chooses the replica, admits the request and lasts as long as it does."""
        with self._inlets.inbox(request.request_id) as inbox:
            called = self._handle.options(stream=True).generate.remote(request, self._inlets.name)
            call = cast("DeploymentResponseGenerator[Address]", called)
            watching = asyncio.create_task(self._watch(call, inbox))
            try:
                while True:
                    chunk = await inbox.take()
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
            finally:
                watching.cancel()
                call.cancel()

    async def _watch(self, call: "DeploymentResponseGenerator[Address]", inbox: Inbox) -> None:
        """Connect to where the call's replica sends from. Only a call that fails ends the stream."""
        try:
            async for source in call:
                self._inlets.connect(inbox, source)
        except Exception as error:  # noqa: BLE001 - whatever it is, the stream has to hear of it
            inbox.fail(as_itself(error))
        except asyncio.CancelledError:
            inbox.fail(WorkerCrashedError())
            raise
        else:
            if inbox.source is None:
                inbox.fail(WorkerCrashedError())  # not a word: its replica was told to stop


def as_itself(error: Exception) -> Exception:
    """The error that was raised in the replica, without Ray's wrapping; a full queue is OverloadedError."""
    if isinstance(error, BackPressureError):
        return OverloadedError("every Target's queue is full; try again later")
    if isinstance(error, RayTaskError) and isinstance(error.cause, DrafthouseError):
        return error.cause
    return error
