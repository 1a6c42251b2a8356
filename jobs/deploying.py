"""What `serve` and `demo` share: put an application on Ray and wait until it answers."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
from ray import serve
from ray.serve import RunTarget
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from cluster.resources import Bundle, free_nodes, needs_of, preflight, sizes_for_one_machine
from serving.app import AppArgs, app
from serving.config import load_profile
from serving.errors import ConfigError, DrafthouseError

APP_NAME = "drafthouse"
_MAX_PORT = 65_535
_POLL_S = 0.25
_UP = ("ready", "degraded")

Say = Callable[[str], None]


def check_asked(args: AppArgs, port: int) -> None:
    """Raise ConfigError for whatever can be known to be wrong before a Ray is started."""
    if not 1 <= port <= _MAX_PORT:
        raise ConfigError(f"--port: must be between 1 and {_MAX_PORT}, got {port}")
    app(args)


def args_for_this_ray(profile_name: str) -> AppArgs:
    """One replica a role, sized by what the roomiest node of the connected Ray has free."""
    largest = max(free_nodes(), key=lambda node: (node.num_gpus, node.num_cpus), default=Bundle())
    sizes = sizes_for_one_machine(
        load_profile(profile_name), num_cpus=max(1, int(largest.num_cpus)), num_gpus=int(largest.num_gpus)
    )
    return AppArgs(profile=profile_name, **sizes)


@contextmanager
def deployed(args: AppArgs) -> Iterator[None]:
    """The application, being placed; taken down at the end.

    Raises PlacementError, or ConfigError where this Ray runs an application of that name, before any of that.
    """
    preflight(needs_of(args, load_profile(args.profile)), free_nodes())
    if APP_NAME in serve.status().applications:
        raise ConfigError(
            f"this Ray already serves an application {APP_NAME!r}, which would be replaced and then taken down; "
            "end it first (serve shutdown), or use another Ray"
        )
    serve.run_many(
        [RunTarget(app(args), name=APP_NAME, route_prefix="/")],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    try:
        yield
    finally:
        serve.delete(APP_NAME)


def wait_until_up(url: str, *, say: Say, timeout_s: float, settle_s: float = 15.0) -> str:
    """Wait for /ready, telling each deployment's progress; returns "ready" or "degraded".

    "degraded" is returned only after `settle_s` of it, for a Target begins without its lease. Raises
    DrafthouseError when the deployment fails or the time is over.
    """
    said: dict[str, str] = {}
    started_s = time.monotonic()
    up_since_s: float | None = None
    while (now_s := time.monotonic()) - started_s < timeout_s:
        overview = serve.status().applications[APP_NAME]
        _tell(overview, said, say)
        _check(overview)
        is_placed = overview.status == ApplicationStatus.RUNNING
        state = readiness(url) if is_placed else "loading"
        up_since_s = up_since_s or now_s if state in _UP else None
        if state == "ready" or (up_since_s is not None and now_s - up_since_s > settle_s):
            return state
        time.sleep(_POLL_S)
    raise DrafthouseError(f"deployment: not ready after {timeout_s:.0f} s; last state: {said}")


def readiness(url: str) -> str:
    """What /ready says: "ready", "degraded", "loading" or "unreachable"."""
    try:
        return str(httpx.get(f"{url}/ready", timeout=10.0).json()["status"])
    except (httpx.HTTPError, ValueError, KeyError):
        return "unreachable"


def _tell(overview: ApplicationStatusOverview, said: dict[str, str], say: Say) -> None:
    for name, deployment in overview.deployments.items():
        state = deployment.status.value.lower()
        if said.get(name) != state:
            said[name] = state
            say(f"{name}: {state}")


def _check(overview: ApplicationStatusOverview) -> None:
    if overview.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
        messages = [overview.message, *(d.message for d in overview.deployments.values())]
        raise DrafthouseError(f"deployment failed: {last_line(messages)}")


def last_line(messages: list[str]) -> str:
    """The end of the most telling message: where Python puts what went wrong."""
    longest = max((message.strip() for message in messages), key=len, default="")
    return longest.splitlines()[-1] if longest else "Serve gives no reason; see /tmp/ray/session_latest/logs/serve"
