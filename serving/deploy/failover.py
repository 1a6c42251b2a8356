"""A stream that outlives the replica that began it."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TypeAlias

from ray.exceptions import NodeDiedError, OwnerDiedError, RayActorError, WorkerCrashedError

from serving.deploy.wire import ChannelLostError
from serving.requests import Chunk, GenerationRequest, Receipt
from serving.types import Ids, as_ids

log = logging.getLogger("ray.serve")

Call: TypeAlias = Callable[[GenerationRequest], AsyncGenerator[Chunk, None]]

MAX_RESUMES = 2
# What a caller sees when the process it called is gone, or out of reach.
DEATHS = (RayActorError, WorkerCrashedError, NodeDiedError, OwnerDiedError, ChannelLostError)


async def generate_with_failover(call: Call, request: GenerationRequest) -> AsyncIterator[Chunk]:
    """The chunks of `request`, resumed on another replica at most MAX_RESUMES times.

    A replica that takes over gets the prompt, the ids delivered, the ledger and the receipt: nothing is
    generated twice, no budget is refilled, and its text goes on after the last character delivered. Each
    attempt has a name of its own, for a replica that was only out of reach may still be at the first. What is
    wrong with the request itself is raised at once.
    """
    name, delivered = request.request_id, request.resume_ids.tolist()
    for number in range(MAX_RESUMES + 1):
        try:
            async with aclosing(call(request)) as chunks:
                async for chunk in chunks:
                    delivered.extend(chunk.ids)
                    seen = request.resume_seen + chunk.seen
                    request = replace(request, ledger=chunk.ledger, receipt=chunk.receipt, resume_seen=seen)
                    yield replace(chunk, request_id=name)
                    if chunk.finish_reason is not None:
                        return
            raise WorkerCrashedError  # a stream without an end: its replica was told to stop
        except DEATHS as death:
            if number == MAX_RESUMES:
                log.error("request %s: lost %d replicas, giving up", name, number + 1)
                raise
            log.warning("request %s: replica lost after %d tokens: %s", name, len(delivered), type(death).__name__)
            request = _resumed(request, f"{name}~{number + 1}", as_ids(delivered))


def _resumed(request: GenerationRequest, request_id: str, ids: Ids) -> GenerationRequest:
    """What a fresh replica needs to go on."""
    receipt = request.receipt or Receipt()
    receipt = replace(receipt, resumed=receipt.resumed + 1)
    return replace(request, request_id=request_id, resume_ids=ids, receipt=receipt)
