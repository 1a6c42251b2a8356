"""A Target's lease on a slim verifier: the actor calls, and the model that the engine thread sees."""

import logging
import uuid
from dataclasses import dataclass
from typing import Any, cast

from ray.serve.handle import DeploymentHandle

from serving.config import Profile
from serving.deploy.drafter_lease import ActorReply
from serving.deploy.lease import Grant, LeaseKeeper, LeaseStream
from serving.deploy.link import Link
from serving.deploy.slim_client import RemoteSlim
from serving.deploy.slim_messages import SlimAnswer, SlimCall

log = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class SlimActor:
    """A leased actor as a `Worker`."""

    grant: Grant

    def send(self, call: SlimCall) -> ActorReply[SlimAnswer]:
        return ActorReply(self.grant.actor.score.remote(call))


class SlimLease:
    """This Target's one lease, and the model that speaks through it."""

    def __init__(self, profile: Profile, handle: DeploymentHandle[Any]) -> None:
        self._owner = uuid.uuid4().hex[:12]
        self._handle = handle
        self._keeper = LeaseKeeper(self._open, self._grant, on_beat=self._beat)
        self.slim = RemoteSlim(self._owner, timeout_s=profile.engine.draft_timeout_s, on_lost=self._keeper.replace)
        self._keeper.start()

    def stop(self) -> None:
        self._keeper.stop()

    def _open(self) -> LeaseStream:
        return cast(LeaseStream, self._handle.options(stream=True).lease.remote(self._owner))

    def _grant(self, grant: Grant | None) -> None:
        log.info("slim verifier %s", "lost" if grant is None else f"{grant.incarnation}: leased")
        self.slim.connect(None if grant is None else Link(SlimActor(grant), grant.incarnation))

    def _beat(self) -> None:
        self.slim.tidy()
