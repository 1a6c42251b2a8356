"""VIA-SD (arXiv 2606.12243): a slim verifier keeps easy draft tokens, rewrites where it is sure, and asks for the rest.

u are the slim verifier's rows, x the drafted token of a row, rho = exp(u[x] - max u), compared as regret <= -ln theta.
Nothing bounds what tiers A and B change: the full target has not seen it.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from serving.rules.prefix import accept_prefix
from serving.types import ScoreTable, Tier, Verdict


@dataclass(frozen=True, slots=True)
class ViaGates:
    """A threshold above 1 turns its tier off. Raises ValueError where theta_accept < theta_escalate.

    `max_unverified` bounds the tokens that no full pass has seen; `has_bonus` emits the slim verifier's own token
    behind a block that it kept whole; `escalates_stops` leaves every stop token to the full target; stop strings are
    text, cut from whatever was decided, and no tier looks at them.
    """

    theta_accept: float = 0.7
    theta_escalate: float = 0.5
    min_confidence: float = 0.5
    max_unverified: int = 32
    has_bonus: bool = False
    escalates_stops: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.theta_escalate <= self.theta_accept:
            raise ValueError(
                f"theta_accept ({self.theta_accept:g}) must be at least theta_escalate ({self.theta_escalate:g}), "
                "both above 0: what is good enough to keep must be good enough to rewrite"
            )


@dataclass(frozen=True, slots=True)
class Route:
    """Tier A keeps draft[:num_kept]; then tier B ends the block with `verdict`, or, where it is None, tier C judges."""

    num_kept: int
    verdict: Verdict | None = None


def route(slim: ScoreTable, gates: ViaGates, *, stop_ids: frozenset[int] = frozenset()) -> Route:
    """What becomes of a block of K >= 1 tokens by the slim verifier's rows, which carry logsumexp. Pure."""
    held = stop_ids if gates.escalates_stops else frozenset()
    prefix = accept_prefix(slim, _keep(slim, gates) & ~np.isin(slim.draft_ids, list(held)))
    kept, next_id = prefix.num_accepted, int(slim.top_ids[prefix.num_accepted])
    if kept == len(slim.draft_ids):
        if not gates.has_bonus:
            return Route(kept, Verdict(kept, None, _slim(kept)))
        is_decided = True
    else:
        is_decided = _is_sure(slim, kept, gates)
    if not is_decided or next_id in held:
        return Route(kept)
    return Route(kept, Verdict(kept, next_id, (*_slim(kept), "regenerated")))


def behind(num_kept: int, rest: Verdict) -> Verdict:
    """`rest`, the full rule's verdict on draft[num_kept:], as one on the whole block."""
    return replace(
        rest,
        num_accepted=num_kept + rest.num_accepted,
        tiers=(*_slim(num_kept), *rest.tiers),
        exceptions=tuple(replace(record, index=record.index + num_kept) for record in rest.exceptions),
        rejected=None if rest.rejected is None else replace(rest.rejected, index=rest.rejected.index + num_kept),
    )


def _slim(count: int) -> tuple[Tier, ...]:
    tiers: list[Tier] = ["slim"] * count
    return tuple(tiers)


def _keep(slim: ScoreTable, gates: ViaGates) -> npt.NDArray[np.bool_]:
    """bool[K]: tier A."""
    within: npt.NDArray[np.bool_] = slim.regret <= -math.log(gates.theta_accept)
    return within | ~slim.mismatch if gates.theta_accept <= 1.0 else within


def _is_sure(slim: ScoreTable, row: int, gates: ViaGates) -> bool:
    """Tier B: the drafted token is not far off, and the slim verifier is confident of its own."""
    assert slim.logsumexp is not None, "the slim verifier scores with logsumexp"
    confidence = math.exp(float(slim.top_logits[row]) - float(slim.logsumexp[row]))
    return bool(slim.regret[row] <= -math.log(gates.theta_escalate)) and confidence >= gates.min_confidence
