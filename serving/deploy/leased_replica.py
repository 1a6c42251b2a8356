"""A role that Targets lease: a Serve deployment that owns one actor, which they call directly."""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serving.config import Profile
from serving.deploy.lease import HEARTBEAT_S, LEASE_S, Grant

log = logging.getLogger("ray.serve")

_PING_S = 1.0
_HOPELESS = 4.0
_RENEWAL_S = 5.0  # how long an owner's sessions are kept after its lease ran out


@dataclass(frozen=True)
class WorkerResources:
    """What the leased actor takes; the replica around it takes nothing."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0


class SilentWorkerError(Exception):
    """The leased actor has not answered for too long."""


class WorkerReplacedError(Exception):
    """The leased actor died before its lease ran out."""


class LeasedReplica:
    """Keeps one worker of `worker_class` alive and leases it out. A worker that dies is replaced; its leases end.

    A worker has `ping`, `release(owner)` and `sessions` beside what its role calls.
    """

    role: ClassVar[str]
    worker_class: ClassVar[type]

    def __init__(self, profile: Profile, resources: WorkerResources, *, silence_limit_s: float = 30.0) -> None:
        self._profile = profile
        self._resources = resources
        self._silence_limit_s = silence_limit_s
        self._leases: Counter[str] = Counter()
        self._lock = asyncio.Lock()
        self._grant = self._spawn()
        self._grant.actor.ping.remote().future().result()  # loaded and warmed up before this replica is ready
        self._answered_s: float = time.monotonic()
        self._watch_task = asyncio.get_running_loop().create_task(self._watch())

    async def lease(self, owner: str) -> AsyncGenerator[Grant | None, None]:
        """The worker, then a heartbeat a second, for LEASE_S or until that worker dies."""
        grant = await self._living()
        self._leases[owner] += 1
        log.info("%s %s: leased by %s", self.role, grant.incarnation, owner)
        has_run_out = False
        try:
            yield grant
            ends_s = time.monotonic() + LEASE_S
            while grant is self._grant and time.monotonic() < ends_s:
                await asyncio.sleep(HEARTBEAT_S)
                yield None
            if grant is not self._grant:
                raise WorkerReplacedError(f"{self.role} {grant.incarnation} died")
            has_run_out = True
        finally:
            self._leases[owner] -= 1
            delay_s = _RENEWAL_S if has_run_out else 0.0
            asyncio.get_running_loop().call_later(delay_s, self._release_unless_renewed, owner)

    async def sessions(self) -> list[tuple[str, str]]:
        """(owner, session_id) of every session the worker holds."""
        held: list[tuple[str, str]] = await self._grant.actor.sessions.remote()
        return held

    async def check_health(self) -> None:
        silent_s = time.monotonic() - self._answered_s
        # Silence alone is answered by a new worker; one that loads is not judged.
        if silent_s > _HOPELESS * self._silence_limit_s and not self._lock.locked():
            raise SilentWorkerError(f"{self.role} {self._grant.incarnation}: no answer for {silent_s:.0f} s")

    def _release_unless_renewed(self, owner: str) -> None:
        if self._leases[owner] <= 0:
            del self._leases[owner]
            self._grant.actor.release.remote(owner)

    def _spawn(self) -> Grant:
        incarnation = uuid.uuid4().hex[:12]
        group = get_current_placement_group()
        worker: Any = ray.remote(self.worker_class).options(
            num_cpus=self._resources.num_cpus,
            num_gpus=self._resources.num_gpus,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0) if group else None,
        )
        actor = cast("ActorHandle[Any]", worker.remote(self._profile, incarnation))
        return Grant(actor, incarnation)

    async def _living(self) -> Grant:
        """The worker, replaced first if it is dead. One that is merely slow is returned as it is."""
        async with self._lock:
            try:
                await asyncio.wait_for(_answer(self._grant), _PING_S)
            except TimeoutError:
                log.info("%s %s: busy", self.role, self._grant.incarnation)
            except RayActorError:
                log.warning("%s %s: died; starting another", self.role, self._grant.incarnation)
                self._grant = self._spawn()
                await _answer(self._grant)
                self._answered_s = time.monotonic()
            return self._grant

    async def _watch(self) -> None:
        """Notice death and silence, also while nobody asks for a lease. A silent worker is ended, then replaced."""
        while True:
            async with self._lock:  # not while one loads, which may take longer
                grant = self._grant
            try:
                await asyncio.wait_for(_answer(grant), self._silence_limit_s)
                self._answered_s = time.monotonic()
            except TimeoutError:
                log.error("%s %s: silent for %.0f s", self.role, grant.incarnation, self._silence_limit_s)
                ray.kill(grant.actor)
            except RayActorError:
                await self._replaced()
            await asyncio.sleep(_PING_S)

    async def _replaced(self) -> None:
        try:
            await self._living()
        except RayActorError:  # the next look finds it dead and tries again
            log.error("%s: the worker that replaced a dead one died while it loaded", self.role)


async def _answer(grant: Grant) -> None:
    await grant.actor.ping.remote()
