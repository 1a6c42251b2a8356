"""A Target's lease on a drafter: the actor calls, and the drafter that the engine thread sees."""

import logging
import uuid
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.serve.handle import DeploymentHandle

from serving.config import Profile
from serving.deploy.clients import RemoteDrafter
from serving.deploy.lease import Grant, LeaseKeeper, LeaseStream
from serving.deploy.link import Link, WorkerFailedError, WorkerLostError
from serving.deploy.messages import DraftAnswer, DraftCall

log = logging.getLogger("ray.serve")


AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class ActorReply(Generic[AnswerT]):
    """An object reference as a `Reply`."""

    ref: "ray.ObjectRef[AnswerT]"

    def result(self, timeout_s: float) -> AnswerT:
        try:
            return ray.get(self.ref, timeout=timeout_s)
        except GetTimeoutError:
            raise TimeoutError from None
        except RayActorError:
            raise WorkerLostError from None
        except RayError as error:
            raise WorkerFailedError(str(error).strip().splitlines()[-1]) from None


@dataclass(frozen=True)
class ActorWorker:
    """A leased actor as a `Worker`."""

    grant: Grant

    def send(self, call: DraftCall) -> ActorReply[DraftAnswer]:
        return ActorReply(self.grant.actor.draft.remote(call))


class DrafterLease:
    """This Target's one lease, and the drafter that speaks through it."""

    def __init__(self, profile: Profile, handle: DeploymentHandle[Any]) -> None:
        self._owner = uuid.uuid4().hex[:12]
        self._handle = handle
        self._keeper = LeaseKeeper(self._open, self._grant, on_beat=self._beat)
        self.drafter = RemoteDrafter(
            self._owner, timeout_s=profile.engine.draft_timeout_s, on_lost=self._keeper.replace
        )
        self._keeper.start()

    def stop(self) -> None:
        self._keeper.stop()

    def _open(self) -> LeaseStream:
        return cast(LeaseStream, self._handle.options(stream=True).lease.remote(self._owner))

    def _grant(self, grant: Grant | None) -> None:
        log.info("drafter %s", "lost" if grant is None else f"{grant.incarnation}: leased")
        self.drafter.connect(None if grant is None else Link(ActorWorker(grant), grant.incarnation))

    def _beat(self) -> None:
        self.drafter.tidy()
