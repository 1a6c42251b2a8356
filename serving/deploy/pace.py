"""How far apart the pieces of streams leave a Target."""

from dataclasses import dataclass

from serving.config import EngineConfig


@dataclass(frozen=True)
class Pace:
    """Seconds between frames to one Gateway: `per_stream_s` for each of its streams, from `least_s` to `most_s`."""

    least_s: float = 0.0
    most_s: float = 0.0
    per_stream_s: float = 0.0

    def period_s(self, num_streams: int) -> float:
        return min(max(self.least_s, num_streams * self.per_stream_s), self.most_s)


# A piece costs about as much however many tokens it has, so 40 a second take the same share of the cores from 4 to 10
# streams; pieces further apart than the quarter of a second that a reader's eye rests would be noticed.
_ON_CPU = Pace(0.1, 0.25, 0.025)


def pace_of(config: EngineConfig, device: str) -> Pace:
    """Where the model computes on the CPU, its streams take time of the cores that it needs."""
    if config.stream_period_ms is not None:
        return Pace(config.stream_period_ms / 1000.0, config.stream_period_ms / 1000.0)
    return _ON_CPU if device == "cpu" else Pace()
