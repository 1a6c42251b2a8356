"""The Serve application: Gateway -> Target -> Drafter, SlimVerifier; each is placed and scaled by itself.

serve deploy cluster/serve.yaml         import_path: serving.app:app, args: the fields of AppArgs
"""

import os
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from serving.api.gateway import create_app
from serving.config import NoDrafter, Profile, ViaVerifier, check_servable, load_profile
from serving.deploy.drafter import DrafterReplica
from serving.deploy.leased_replica import LeasedReplica, WorkerResources
from serving.deploy.logs import join_serve_log
from serving.deploy.options import Scaling, gateway_deployment, leased_deployment, target_deployment
from serving.deploy.slim import SlimReplica
from serving.deploy.target import TargetReplica
from serving.deploy.target_client import TargetClient
from serving.errors import ConfigError
from serving.models.tokenizer import ChatTokenizer


class AppArgs(BaseModel):
    """What a deployment of one profile is made of; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: str = Field(description="a shipped profile by name, or a YAML file that the cluster can read")
    gateway: Scaling = Scaling(num_cpus=0)
    target: Scaling = Scaling()
    drafter: Scaling = Scaling()
    slim: Scaling = Scaling()
    leases_per_drafter: int = Field(default=4, ge=1, le=256, description="Targets that one Drafter serves")
    leases_per_slim: int = Field(default=4, ge=1, le=256, description="Targets that one SlimVerifier serves")
    api_keys_env: str | None = Field(
        default=None,
        min_length=1,
        description="variable with the accepted API keys, separated by commas, read where the application is built",
    )
    drain_s: float = Field(default=600.0, ge=1.0, le=86_400.0, description="more than the longest generation")
    stall_limit_s: float = Field(default=30.0, ge=1.0, le=3_600.0, description="no round for so long: unhealthy")

    def has_remote_drafter(self, profile: Profile) -> bool:
        """Whether `profile` takes a Drafter deployment."""
        return profile.placement == "separate" and not isinstance(profile.drafter, NoDrafter)

    def has_remote_slim(self, profile: Profile) -> bool:
        """Whether `profile` takes a SlimVerifier deployment."""
        return profile.placement == "separate" and isinstance(profile.verifier, ViaVerifier)


def app(args: AppArgs) -> Application:
    """Wire the roles of `args.profile`. Raises ConfigError before anything is placed."""
    profile = load_profile(args.profile)
    check_servable(profile)
    _check_mask(profile)
    keys = api_keys(args.api_keys_env)
    drafter = _leased(DrafterReplica, "Drafter", args, profile) if args.has_remote_drafter(profile) else None
    slim = _leased(SlimReplica, "SlimVerifier", args, profile) if args.has_remote_slim(profile) else None
    target = target_deployment(TargetReplica, args.target, profile, drain_s=args.drain_s)
    gateway = gateway_deployment(GatewayIngress, args.gateway, drain_s=args.drain_s)
    return gateway.bind(profile, target.bind(profile, drafter, slim, stall_limit_s=args.stall_limit_s), keys)


def _check_mask(profile: Profile) -> None:
    """Raise ConfigError for a slim verifier whose mask is for another target."""
    if isinstance(profile.verifier, ViaVerifier):
        from serving.build_via import mask_of  # torch: only where there is a mask

        mask_of(profile, profile.verifier)


def api_keys(variable: str | None) -> frozenset[str]:
    """The keys in environment variable `variable`; none means that the API is open."""
    if variable is None:
        return frozenset()
    keys = frozenset(key.strip() for key in os.environ.get(variable, "").split(",") if key.strip())
    if not keys:
        raise ConfigError(f"api_keys_env: the environment variable {variable!r} holds no key")
    return keys


class Gateway:
    """The HTTP API of one profile, in front of its Targets. Needs the tokenizer, never the model."""

    def __init__(self, profile: Profile, target: DeploymentHandle[Any], keys: frozenset[str]) -> None:
        join_serve_log()
        self._keys = keys
        self._backend = GatewayBackend(profile, target)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve in the replica, so the application never travels."""
        return create_app(self._backend, api_keys=self._keys, sends_request_id=False)  # Ray's proxy does


class GatewayBackend(TargetClient):
    """The API's backend: the Targets, and what it takes to speak to them."""

    def __init__(self, profile: Profile, target: DeploymentHandle[Any]) -> None:
        super().__init__(target)
        self.profile = profile
        self.tokenizer = ChatTokenizer.load(profile.target.model)


GatewayIngress = serve.ingress()(Gateway)


def _leased(replica: type[LeasedReplica], name: str, args: AppArgs, profile: Profile) -> Application:
    is_drafter = replica is DrafterReplica
    scaling, leases = (args.drafter, args.leases_per_drafter) if is_drafter else (args.slim, args.leases_per_slim)
    deployment = leased_deployment(replica, scaling, name=name, leases_per_replica=leases)
    resources = WorkerResources(scaling.num_cpus, scaling.num_gpus)
    return deployment.bind(shared(profile, leases), resources, silence_limit_s=args.stall_limit_s)


def shared(profile: Profile, num_targets: int) -> Profile:
    """`profile` for a leased role that serves the sessions of `num_targets` engines."""
    num_sessions = min(512, profile.engine.max_sessions * num_targets)
    return profile.model_copy(update={"engine": profile.engine.model_copy(update={"max_sessions": num_sessions})})
