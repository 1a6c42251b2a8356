"""Instruments that remember, and an engine's numbers as readings without an engine."""

from collections import Counter
from dataclasses import dataclass, field

from serving.decode.engine import Health
from serving.decode.scheduler import Scheduler
from serving.deploy.hops import Hops
from serving.deploy.metric_table import Metric
from serving.deploy.readings import Reading


@dataclass
class Meters:
    """What each metric shows, by its name and label."""

    counts: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    gauges: dict[str, float] = field(default_factory=dict)
    observed: dict[tuple[str, str | None], list[float]] = field(default_factory=dict)

    def count(self, metric: Metric, value: float, label: str | None = None) -> None:
        assert (metric.kind, metric.label is None) == ("counter", label is None)
        assert value > 0, "Ray refuses anything else"
        self.counts[metric.name, label] += value

    def set(self, metric: Metric, value: float) -> None:
        assert metric.kind == "gauge"
        self.gauges[metric.name] = value

    def observe(self, metric: Metric, value: float, label: str | None = None) -> None:
        assert (metric.kind, metric.label is None) == ("histogram", label is None)
        self.observed.setdefault((metric.name, label), []).append(value)


def reading_of(scheduler: Scheduler, *, time_s: float, hops: Hops | None = None, ended=()) -> Reading:
    """What a Target would read from this scheduler at `time_s`."""
    health = Health(0.0, scheduler.num_running, scheduler.num_waiting, scheduler.degraded, failed_rounds=0)
    return Reading(time_s, health, scheduler.stats.copy(), hops or Hops(), queue_limit=8, ended=ended)
