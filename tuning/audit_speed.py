"""A candidate's speed by triples strict - candidate - strict, and whether the machine was steady enough to claim it."""

from collections.abc import Sequence
from dataclasses import dataclass

from tuning.audit_records import KeyedRecord
from tuning.bootstrap import Interval, ratio

LEAST_TRIPLES = 6  # resampled by fewer, an interval is narrower than the truth
TOLERANCE = 0.03


class Triple(KeyedRecord):
    """Seconds that strict, the candidate and strict again took for the same `num_tokens`, one after the other.

    `took_s` is the whole triple's, with what is not timed.
    """

    candidate: str
    number: int
    prompt_ids: tuple[str, ...]
    num_tokens: int
    strict_s: tuple[float, float]
    candidate_s: float
    took_s: float


@dataclass(frozen=True)
class SpeedNumbers:
    """Of one candidate's triples. Its ratio is to the mean of the two neighbours, strict's is the first to the second.

    The protocol is met where there are LEAST_TRIPLES and the interval of strict's ratio to itself is within TOLERANCE
    of 1. Intervals are over triples; of fewer than LEAST_TRIPLES they have no ends.
    """

    triples: int
    tokens_per_s: float | None
    strict_tokens_per_s: float | None
    ratio_to_strict: Interval | None
    strict_ratio_to_itself: Interval | None
    protocol_met: bool


def speed_numbers(triples: Sequence[Triple]) -> SpeedNumbers:
    """`triples` are of one candidate."""
    ours = [triple.candidate_s for triple in triples]
    first, second = [triple.strict_s[0] for triple in triples], [triple.strict_s[1] for triple in triples]
    neighbours = [sum(triple.strict_s) / 2 for triple in triples]
    num_tokens = sum(triple.num_tokens for triple in triples)
    itself = _speed_ratio(second, first)
    return SpeedNumbers(
        triples=len(triples),
        tokens_per_s=round(num_tokens / sum(ours), 4) if triples else None,
        strict_tokens_per_s=round(num_tokens / sum(neighbours), 4) if triples else None,
        ratio_to_strict=_speed_ratio(neighbours, ours),
        strict_ratio_to_itself=itself,
        protocol_met=_is_steady(itself),
    )


def _speed_ratio(other_s: Sequence[float], ours_s: Sequence[float]) -> Interval | None:
    """How many times as fast those are that took `ours_s` for the work of which others took `other_s`."""
    found = ratio(other_s, ours_s)
    return found if found is None or len(ours_s) >= LEAST_TRIPLES else Interval(found.value, None, None)


def _is_steady(itself: Interval | None) -> bool:
    if itself is None or itself.low is None or itself.high is None:
        return False
    return itself.low >= 1.0 - TOLERANCE and itself.high <= 1.0 + TOLERANCE
