"""What a Target says about itself, for readiness and metrics."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TargetStatus:
    """`degraded`: ready, but it decodes plainly, without its drafter. `stats` are the engine's counters."""

    ready: bool
    degraded: bool
    running: int
    waiting: int
    stats: dict[str, float | list[int]]
