"""A Target deployment as its callers see it: one stream a request, whichever replicas it takes."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

from ray.exceptions import RayTaskError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from serving.deploy.failover import generate_with_failover
from serving.deploy.status import TargetStatus
from serving.errors import DrafthouseError, OverloadedError
from serving.requests import Chunk, GenerationRequest


class TargetClient:
    """Calls a Target by its handle; errors arrive as themselves, not as Ray's."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """The chunks of `request`. Closing the iterator cancels it in every role."""
        return generate_with_failover(self._attempt, request)

    async def status(self) -> TargetStatus:
        """Of one replica, whichever is asked."""
        status: TargetStatus = await self._handle.status.remote()
        return status

    async def _attempt(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        called = self._handle.options(stream=True).generate.remote(request)
        response = cast("DeploymentResponseGenerator[Chunk]", called)
        try:
            async for chunk in response:
                yield chunk
        except (DrafthouseError, BackPressureError) as error:
            raise as_itself(error) from None
        finally:
            response.cancel()


def as_itself(error: Exception) -> Exception:
    """The error that was raised in the replica, without Ray's wrapping; a full queue is OverloadedError."""
    if isinstance(error, BackPressureError):
        return OverloadedError("every Target's queue is full; try again later")
    if isinstance(error, RayTaskError) and isinstance(error.cause, DrafthouseError):
        return error.cause
    return error
