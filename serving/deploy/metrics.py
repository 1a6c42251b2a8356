"""A Target's metrics on Ray's Prometheus endpoint, with Serve's labels: deployment, replica, application.

They are published from the replica's event loop, from copies of the engine's counters, so that the engine thread
pays for nothing but its counting. What there is: `deploy.metric_table`.
"""

import asyncio
import logging
from collections.abc import Callable

from ray.serve.metrics import Counter, Gauge, Histogram

from serving.deploy.metric_table import METRICS, Metric
from serving.deploy.readings import Publisher, Reading

log = logging.getLogger("ray.serve")

PERIOD_S = 1.0


class RayInstruments:
    """The metrics of this replica as Ray keeps them. To be made within a replica: Serve's labels come from there."""

    def __init__(self) -> None:
        self._counters = {m: Counter(m.name, m.description, _keys(m)) for m in METRICS if m.kind == "counter"}
        self._gauges = {m: Gauge(m.name, m.description) for m in METRICS if m.kind == "gauge"}
        self._histograms = {
            m: Histogram(m.name, m.description, list(m.boundaries), _keys(m)) for m in METRICS if m.kind == "histogram"
        }

    def count(self, metric: Metric, value: float, label: str | None = None) -> None:
        self._counters[metric].inc(value, _tags(metric, label))

    def set(self, metric: Metric, value: float) -> None:
        self._gauges[metric].set(value)

    def observe(self, metric: Metric, value: float, label: str | None = None) -> None:
        self._histograms[metric].observe(value, _tags(metric, label))


async def publish_for_ever(publisher: Publisher, read: Callable[[], Reading], *, period_s: float = PERIOD_S) -> None:
    """Publish a reading every `period_s`, until cancelled. One that fails is logged; the next may be better."""
    while True:
        try:
            publisher.publish(read())
        except Exception:  # the task's boundary: metrics must not end with one bad reading
            log.exception("metrics could not be published; trying again")
        await asyncio.sleep(period_s)


def _keys(metric: Metric) -> tuple[str] | None:
    return None if metric.label is None else (metric.label,)


def _tags(metric: Metric, label: str | None) -> dict[str, str]:
    return {} if metric.label is None or label is None else {metric.label: label}
