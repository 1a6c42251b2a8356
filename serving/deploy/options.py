"""From a role's sizes to its Serve deployment."""

from collections.abc import Callable
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve import Deployment
from ray.serve.config import AutoscalingConfig

from serving.config import Profile
from serving.deploy.lease import LEASE_S

# Calls beyond an engine's own queue that a replica takes in: status, and requests that the engine refuses.
_SLACK = 32
_DRAFTER_DRAIN_S = LEASE_S + 10.0
_HEALTH_PERIOD_S = 5.0
_CONSTRUCTOR_TRIES = 3
_GATEWAY_STREAMS = 1024


class Scaling(BaseModel):
    """How many replicas a role has, and the load per replica at which Serve adds one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_cpus: float = Field(default=1.0, ge=0.0, le=4096.0, description="per replica")
    num_gpus: float = Field(default=0.0, ge=0.0, le=64.0, description="per replica")
    min_replicas: int = Field(default=1, ge=1, le=4096)
    max_replicas: int = Field(default=1, ge=1, le=4096)
    target_ongoing_requests: float | None = Field(default=None, gt=0.0, description="None: the role's own")

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        low, high = self.min_replicas, self.max_replicas
        if low == high and self.target_ongoing_requests is not None:
            raise ValueError("target_ongoing_requests has no effect where min_replicas equals max_replicas; drop it")
        if high < low:
            raise ValueError(f"max_replicas ({high}) must not be below min_replicas ({low})")
        return self

    @property
    def is_fixed(self) -> bool:
        return self.min_replicas == self.max_replicas

    def applied(self, deployment: Deployment, *, default_target: float) -> Deployment:
        """`deployment` with a fixed number of replicas, or scaled by Serve on ongoing requests."""
        if self.is_fixed:
            return deployment.options(num_replicas=self.min_replicas)
        return deployment.options(
            autoscaling_config=AutoscalingConfig(
                min_replicas=self.min_replicas,
                max_replicas=self.max_replicas,
                target_ongoing_requests=self.target_ongoing_requests or default_target,
            )
        )


def gateway_deployment(cls: Callable[..., Any], scaling: Scaling, *, drain_s: float) -> Deployment:
    """Streams are cheap to hold, so many to a replica; beyond them 429, never a silent wait."""
    deployment = serve.deployment(
        name="Gateway",
        ray_actor_options={"num_cpus": scaling.num_cpus, "num_gpus": 0},
        max_ongoing_requests=_GATEWAY_STREAMS,
        max_queued_requests=2 * _GATEWAY_STREAMS,
        backpressure_config={"status_code": 429, "retry_after_s": 2},
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=_HEALTH_PERIOD_S,
        max_constructor_retry_count=_CONSTRUCTOR_TRIES,
    )(cls)
    return scaling.applied(deployment, default_target=_GATEWAY_STREAMS / 4)


def target_deployment(cls: Callable[..., Any], scaling: Scaling, profile: Profile, *, drain_s: float) -> Deployment:
    """Waiting happens in the engine, where tenants take turns; Serve's own queue is a backstop."""
    capacity = profile.engine.max_sessions + profile.engine.max_queued + _SLACK
    deployment = serve.deployment(
        name="Target",
        ray_actor_options={"num_cpus": scaling.num_cpus, "num_gpus": scaling.num_gpus},
        max_ongoing_requests=capacity,
        max_queued_requests=4 * capacity,
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=_HEALTH_PERIOD_S,
        max_constructor_retry_count=_CONSTRUCTOR_TRIES,
    )(cls)
    return scaling.applied(deployment, default_target=max(1.0, 0.75 * profile.engine.max_sessions))


def leased_deployment(cls: Callable[..., Any], scaling: Scaling, *, name: str, leases_per_replica: int) -> Deployment:
    """A role that Targets lease. A lease counts as one ongoing request, so replicas scale by the Targets they serve.

    The replica itself takes nothing; its worker sits in the replica's placement group, bundle 0.
    """
    deployment = serve.deployment(
        name=name,
        ray_actor_options={"num_cpus": 0, "num_gpus": 0},
        # Room for the leases of a replica that drains, and for renewals that overlap their predecessors.
        max_ongoing_requests=4 * leases_per_replica + _SLACK,
        max_queued_requests=16 * leases_per_replica + _SLACK,
        graceful_shutdown_timeout_s=_DRAFTER_DRAIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=_HEALTH_PERIOD_S,
        max_constructor_retry_count=_CONSTRUCTOR_TRIES,
    )(cls)
    bundle = {kind: amount for kind, amount in _bundle(scaling).items() if amount}
    if bundle:
        deployment = deployment.options(placement_group_bundles=[bundle], placement_group_strategy="STRICT_PACK")
    return scaling.applied(deployment, default_target=float(leases_per_replica))


def _bundle(scaling: Scaling) -> dict[str, float]:
    return {"CPU": scaling.num_cpus, "GPU": scaling.num_gpus}
