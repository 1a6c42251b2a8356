"""What the roles of an application take, whether a cluster has it, and sizes that suit one machine."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import ray

from serving.app import AppArgs
from serving.config import NoDrafter, Profile, SuffixDrafter, ViaVerifier
from serving.deploy.options import Scaling
from serving.errors import DrafthouseError

_FEW_CPUS = 4


class PlacementError(DrafthouseError):
    """The cluster lacks what the application needs; nothing was placed. Carries the table."""


@dataclass(frozen=True)
class Bundle:
    """CPUs and GPUs that must be free on one node."""

    num_cpus: float = 0.0
    num_gpus: float = 0.0

    def __add__(self, other: "Bundle") -> "Bundle":
        return Bundle(self.num_cpus + other.num_cpus, self.num_gpus + other.num_gpus)

    def __sub__(self, other: "Bundle") -> "Bundle":
        return Bundle(self.num_cpus - other.num_cpus, self.num_gpus - other.num_gpus)

    def fits(self, room: "Bundle") -> bool:
        return self.num_cpus <= room.num_cpus + 1e-6 and self.num_gpus <= room.num_gpus + 1e-6

    @classmethod
    def of(cls, resources: Mapping[str, float]) -> "Bundle":
        return cls(resources.get("CPU", 0.0), resources.get("GPU", 0.0))


@dataclass(frozen=True)
class Need:
    """The replicas that a role starts with; each takes one bundle."""

    role: str
    replicas: int
    bundle: Bundle

    @classmethod
    def of(cls, role: str, scaling: Scaling) -> "Need":
        return cls(role, scaling.min_replicas, Bundle(scaling.num_cpus, scaling.num_gpus))


def needs_of(args: AppArgs, profile: Profile) -> list[Need]:
    """What has to be there before the application can be ready; growing beyond it is autoscaling's affair."""
    needs = [Need.of("gateway", args.gateway), Need.of("target", args.target)]
    if args.has_remote_drafter(profile):
        needs.append(Need.of("drafter", args.drafter))
    if args.has_remote_slim(profile):
        needs.append(Need.of("slim", args.slim))
    return needs


def preflight(needs: Sequence[Need], nodes: Sequence[Bundle]) -> None:
    """Raise PlacementError unless every bundle finds a node. `nodes` is what is free on each."""
    room = list(nodes)
    missing: list[str] = []
    wanted = [(need.role, need.bundle) for need in needs for _ in range(need.replicas)]
    for role, bundle in sorted(wanted, key=lambda entry: (-entry[1].num_gpus, -entry[1].num_cpus)):
        node = next((i for i, free in enumerate(room) if bundle.fits(free)), None)
        if node is None:
            missing.append(role)
        else:
            room[node] -= bundle
    if missing:
        short = ", ".join(f"{role} x{missing.count(role)}" for role in dict.fromkeys(missing))
        raise PlacementError(f"placement: this Ray has no room for {short}; nothing was placed\n{table(needs, nodes)}")


def table(needs: Sequence[Need], nodes: Sequence[Bundle]) -> str:
    """Needed against available, a line a role and a line a node."""
    rows = [(need.role, str(need.replicas), need.bundle) for need in needs]
    total = _sum(bundle for _, replicas, bundle in rows for _ in range(int(replicas)))
    rows.append(("needed in all", "", total))
    rows += [(f"free on node {number}", "", free) for number, free in enumerate(nodes, start=1)]
    lines = [f"  {'':18}{'replicas':>9}{'CPUs':>8}{'GPUs':>8}"]
    lines += [f"  {name:18}{count:>9}{bundle.num_cpus:>8g}{bundle.num_gpus:>8g}" for name, count, bundle in rows]
    return "\n".join(lines)


def all_nodes() -> list[Bundle]:
    """What each node of the cluster that this process is connected to has, free or in use."""
    return [Bundle.of(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def free_nodes() -> list[Bundle]:
    """What is free on each of these nodes."""
    free = Bundle.of(ray.available_resources())
    # Ray tells the free sum only, so on a larger cluster in use each node is taken to have at most that sum.
    return [Bundle(min(t.num_cpus, free.num_cpus), min(t.num_gpus, free.num_gpus)) for t in all_nodes()]


def sizes_for_one_machine(profile: Profile, *, num_cpus: int, num_gpus: int) -> dict[str, Scaling]:
    """One replica a role. The Target gets what the drafter and the slim verifier leave.

    A suffix cache needs no core of its own. On a small machine no such role gets one: it works while the Target waits
    for it, and a core less would halve the Target's speed.
    """
    is_light = isinstance(profile.drafter, NoDrafter | SuffixDrafter) or profile.placement == "colocated"
    has_slim = isinstance(profile.verifier, ViaVerifier) and profile.placement == "separate"
    quarter = 0 if num_cpus < _FEW_CPUS else num_cpus // 4
    drafter_cpus, slim_cpus = 0 if is_light else quarter, quarter if has_slim else 0
    drafter_gpus = 0 if is_light else min(1, max(0, num_gpus - 1))
    slim_gpus = min(1, max(0, num_gpus - 1 - drafter_gpus)) if has_slim else 0
    return {
        "gateway": Scaling(num_cpus=0),
        "target": Scaling(num_cpus=num_cpus - drafter_cpus - slim_cpus, num_gpus=min(1, num_gpus)),
        "drafter": Scaling(num_cpus=drafter_cpus, num_gpus=drafter_gpus),
        "slim": Scaling(num_cpus=slim_cpus, num_gpus=slim_gpus),
    }


def _sum(bundles: Iterable[Bundle]) -> Bundle:
    return sum(bundles, start=Bundle())
