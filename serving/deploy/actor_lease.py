"""A Target's lease on an actor of another role: the actor calls, and the role that the engine thread sees."""

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.serve.handle import DeploymentHandle

from serving.deploy.lease import Grant, LeaseKeeper, LeaseStream
from serving.deploy.link import Link, WorkerFailedError, WorkerLostError

log = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class ActorReply:
    """An object reference as a `Reply`."""

    ref: "ray.ObjectRef[Any]"

    def result(self, timeout_s: float) -> Any:  # noqa: ANN401 - whatever the actor's method answers
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
    """A leased actor as a `Worker`; `method` takes its calls."""

    grant: Grant
    method: str

    def send(self, call: object) -> ActorReply:
        return ActorReply(getattr(self.grant.actor, self.method).remote(call))


class RemoteRole(Protocol):
    """A role that speaks through a link, from any thread."""

    def connect(self, link: Link[Any, Any] | None) -> None: ...

    def tidy(self) -> None: ...


RoleT = TypeVar("RoleT", bound=RemoteRole)


class ActorLease(Generic[RoleT]):
    """This Target's one lease on `role`. `make` gets the owner's name and what to call when the actor is lost."""

    def __init__(
        self, handle: DeploymentHandle[Any], make: Callable[[str, Callable[[], None]], RoleT], *, role: str, method: str
    ) -> None:
        self._owner = uuid.uuid4().hex[:12]
        self._handle = handle
        self._role = role
        self._method = method
        self._keeper = LeaseKeeper(self._open, self._grant, on_beat=self._beat)
        self.remote = make(self._owner, self._keeper.replace)
        self._keeper.start()

    def stop(self) -> None:
        self._keeper.stop()

    def _open(self) -> LeaseStream:
        return cast(LeaseStream, self._handle.options(stream=True).lease.remote(self._owner))

    def _grant(self, grant: Grant | None) -> None:
        log.info("%s %s", self._role, "lost" if grant is None else f"{grant.incarnation}: leased")
        self.remote.connect(None if grant is None else Link(ActorWorker(grant, self._method), grant.incarnation))

    def _beat(self) -> None:
        self.remote.tidy()
