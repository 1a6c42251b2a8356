"""The Target: one engine behind one call a request, its chunks beside it. Ray enters with the drafter's handle only."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from serving.config import Profile
from serving.decode.engine import Health
from serving.decode.scheduler import Sink
from serving.decode.stats import EngineStats
from serving.deploy.actor_lease import ActorLease
from serving.deploy.clients import RemoteDrafter
from serving.deploy.correction_actor import CorrectionLink
from serving.deploy.hops import Hops
from serving.deploy.logs import join_serve_log
from serving.deploy.metrics import RayInstruments, publish_for_ever
from serving.deploy.outlets import Departure, Outlet, Outlets
from serving.deploy.pace import pace_of
from serving.deploy.readings import Publisher, Reading
from serving.deploy.slim_client import RemoteSlim
from serving.deploy.status import TargetStatus
from serving.deploy.wire import Address
from serving.requests import GenerationRequest

log = logging.getLogger("ray.serve")

# One request may be poison, and so may the next; an engine that answers nothing in between is broken.
MAX_FAILED_ROUNDS = 3


class Generator(Protocol):
    """The part of `decode.engine.Engine` that a replica uses."""

    @property
    def health(self) -> Health: ...

    @property
    def stats(self) -> EngineStats: ...

    def submit(self, request: GenerationRequest, sink: Sink) -> None: ...

    def cancel(self, request_id: str) -> None: ...


@contextmanager
def admitted(engine: Generator, request: GenerationRequest, outlet: Outlet) -> Iterator[Departure]:
    """`request` in work while the block lasts, its chunks leaving by `outlet`.

    Raises RequestError and OverloadedError where it is not. Leaving the block before the last chunk has left frees
    the request's state in every role.
    """
    with outlet.departure(request.request_id) as departure:
        engine.submit(request, outlet.put)
        try:
            yield departure
        finally:
            if departure.finish_reason is None:
                engine.cancel(request.request_id)
            reason = departure.finish_reason or "abandoned"
            log.info("request %s: %s after %d tokens", request.request_id, reason, departure.num_tokens)


class StalledError(Exception):
    """No round has been completed for too long although requests are in work, or one after the other has failed."""


def raise_if_stalled(health: Health, *, limit_s: float) -> None:
    """StalledError where no round was completed for more than `limit_s` of work, or the latest have all failed."""
    if (complaint := _complaint(health, limit_s=limit_s)) is not None:
        raise StalledError(complaint)


def _complaint(health: Health, *, limit_s: float) -> str | None:
    """Why an engine is to be replaced; None while it is well."""
    if health.stalled_s > limit_s:
        return f"no round was completed for {health.stalled_s:.0f} s"
    if health.failed_rounds >= MAX_FAILED_ROUNDS:
        return f"{health.failed_rounds} rounds in a row have failed; the log says how"
    return None


def _drafter_lease(profile: Profile, handle: DeploymentHandle[Any]) -> ActorLease[RemoteDrafter]:
    def make(owner: str, on_lost: Callable[[], None]) -> RemoteDrafter:
        return RemoteDrafter(owner, timeout_s=profile.engine.draft_timeout_s, on_lost=on_lost)

    return ActorLease(handle, make, role="drafter", method="draft")


def _slim_lease(profile: Profile, handle: DeploymentHandle[Any]) -> ActorLease[RemoteSlim]:
    def make(owner: str, on_lost: Callable[[], None]) -> RemoteSlim:
        return RemoteSlim(owner, timeout_s=profile.engine.draft_timeout_s, on_lost=on_lost)

    return ActorLease(handle, make, role="slim verifier", method="score")


class TargetReplica:
    """Owns the engine of one profile: built, warmed up and running when the constructor returns."""

    def __init__(
        self,
        profile: Profile,
        drafter: DeploymentHandle[Any] | None = None,
        slim: DeploymentHandle[Any] | None = None,
        *,
        stall_limit_s: float = 30.0,
    ) -> None:
        join_serve_log()
        # torch: not for the processes that only wire deployments
        from serving.build import RemoteRoles, build
        from serving.models.loading import default_device

        self._stall_limit_s = stall_limit_s
        self._lease = None if drafter is None else _drafter_lease(profile, drafter)
        self._slim_lease = None if slim is None else _slim_lease(profile, slim)
        roles = RemoteRoles(
            drafter=None if self._lease is None else self._lease.remote,
            slim=None if self._slim_lease is None else self._slim_lease.remote,
        )
        built = build(profile, remote=roles)
        if self._lease is not None and built.read_features is not None:
            self._lease.remote.feed(built.read_features)
        self._engine = built.engine()
        self._engine.start()
        self._outlets = Outlets(get_node_ip_address(), pace=pace_of(profile.engine, default_device().type))
        self._queue_limit = profile.engine.max_queued
        calibration = getattr(profile.rule, "calibration", None)
        publisher = Publisher(
            RayInstruments(), profile=profile.name, calibrated=calibration.shares if calibration else None
        )
        publishing = publish_for_ever(publisher, self._read)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(publishing)]
        if built.rules.online is not None:
            link = CorrectionLink.of(profile, built.tokenizer, built.rules.online)
            self._tasks.append(loop.create_task(link.exchange_for_ever()))

    async def generate(self, request: GenerationRequest, gateway: bytes) -> AsyncGenerator[Address, None]:
        """Where the chunks of an admitted request come from, for the Gateway of that name; ends with the request.

        Chunks do not pass here, but Serve counts, drains and cancels a request by this call. See `admitted`.
        """
        log.info("request %s: %d prompt tokens", request.request_id, len(request.prompt_ids))
        with admitted(self._engine, request, self._outlets.outlet(gateway)) as departure:
            yield self._outlets.address
            await departure.complete()

    async def status(self) -> TargetStatus:
        health = self._engine.health
        return TargetStatus(
            ready=_complaint(health, limit_s=self._stall_limit_s) is None,
            degraded=health.degraded,
            running=health.num_running,
            waiting=health.num_waiting,
            stats=self._engine.stats.snapshot(),
        )

    async def check_health(self) -> None:
        """Judged by the latest rounds: a busy engine is healthy, one that is stuck or only fails is not."""
        raise_if_stalled(self._engine.health, limit_s=self._stall_limit_s)

    def _read(self) -> Reading:
        return Reading(
            time_s=time.monotonic(),
            health=self._engine.health,
            stats=self._engine.stats,
            hops=Hops() if self._lease is None else self._lease.remote.hops,
            slim_hops=Hops() if self._slim_lease is None else self._slim_lease.remote.hops,
            queue_limit=self._queue_limit,
            ended=self._engine.drain_times(),
        )

    def __del__(self) -> None:
        """Serve calls this when the last request is through."""
        for name in ("_lease", "_slim_lease"):
            lease = getattr(self, name, None)  # absent where the constructor raised
            if lease is not None:
                lease.stop()
        if (outlets := getattr(self, "_outlets", None)) is not None:
            outlets.close()
        for task in getattr(self, "_tasks", ()):
            task.cancel()
