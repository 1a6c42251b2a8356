"""A candidate's speed by triples strict - candidate - strict, and whether the machine was steady enough to claim it."""

from collections.abc import Sequence
from dataclasses import dataclass

from tuning.audit_records import KeyedRecord
from tuning.bootstrap import Interval, ratio

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

    Intervals are over triples. The protocol is met where that of strict's ratio to itself is within TOLERANCE of 1.
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
    itself = ratio(second, first)
    return SpeedNumbers(
        triples=len(triples),
        tokens_per_s=round(num_tokens / sum(ours), 4) if triples else None,
        strict_tokens_per_s=round(num_tokens / sum(neighbours), 4) if triples else None,
        ratio_to_strict=ratio(neighbours, ours),
        strict_ratio_to_itself=itself,
        protocol_met=_is_steady(itself),
    )


def _is_steady(itself: Interval | None) -> bool:
    if itself is None or itself.ends is None:
        return False
    low, high = itself.ends
    return low >= 1.0 - TOLERANCE and high <= 1.0 + TOLERANCE
