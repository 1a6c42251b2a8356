"""What a Target says about itself, for readiness and metrics."""

from dataclasses import dataclass

from serving.decode.stats import Snapshot


@dataclass(frozen=True)
class TargetStatus:
    """`degraded`: ready, but without its drafter or its slim verifier. `stats` are the engine's counters."""

    ready: bool
    degraded: bool
    running: int
    waiting: int
    stats: Snapshot
