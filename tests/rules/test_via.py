"""VIA-SD's tiers on single blocks: tables of literal rows, and properties of random ones."""

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.rules.prefix import accept_prefix
from serving.rules.strict import StrictRule
from serving.rules.via import ViaGates, behind, route
from serving.types import ExceptionRecord, Ledger, ScoreTable, Verdict
from tests.rules.test_prefix import blocks, table

THETAS = st.floats(0.01, 0.99)


def rows(*values: list[float]) -> npt.NDArray[np.float32]:
    """Logits from probabilities."""
    return np.log(np.array(values, dtype=np.float32))


def with_sums(scores: ScoreTable, logits: npt.NDArray[np.float32] | None = None) -> ScoreTable:
    sums = np.zeros(len(scores.next_ids)) if logits is None else np.log(np.exp(logits.astype(float)).sum(axis=1))
    return replace(scores, logsumexp=sums.astype(np.float32))


def scored(draft: list[int], *values: list[float]) -> ScoreTable:
    return with_sums(table(draft, rows(*values)), rows(*values))


EASY = [0.8, 0.1, 0.1]  # argmax 0
CLOSE = [0.5, 0.45, 0.05]  # token 1 has rho 0.9
FAIR = [0.6, 0.35, 0.05]  # token 1 has rho 0.58, and 0 is likely enough
VAGUE = [0.4, 0.25, 0.35]  # token 1 has rho 0.63, but 0 is not likely enough
BAD = [0.9, 0.05, 0.05]


@pytest.mark.parametrize(
    ("draft", "values", "kept", "next_id"),
    [
        ([0, 0], (EASY, EASY, EASY), 2, None),  # all kept: no bonus
        ([0, 1], (EASY, CLOSE, EASY), 2, None),  # near enough to the best
        ([1, 0], (FAIR, EASY, EASY), 0, 0),  # rewritten, and the block ends
        ([0, 1], (EASY, FAIR, EASY), 1, 0),
        ([1, 0], (VAGUE, EASY, EASY), 0, "full"),  # fair, but the slim verifier is not sure of its own
        ([0, 1, 0], (EASY, BAD, EASY, EASY), 1, "full"),
    ],
)
def test_the_tiers(draft, values, kept, next_id):
    routed = route(scored(draft, *values), ViaGates())
    assert routed.num_kept == kept
    if next_id == "full":
        assert routed.verdict is None
    else:
        tiers = ("slim",) * kept + (() if next_id is None else ("regenerated",))
        assert routed.verdict == Verdict(kept, next_id, tiers)


def test_the_bonus_is_the_slim_verifiers_own_token_and_counts_as_tier_b():
    routed = route(scored([0, 0], EASY, EASY, FAIR), ViaGates(has_bonus=True))
    assert routed.verdict == Verdict(2, 0, ("slim", "slim", "regenerated"))


@pytest.mark.parametrize(
    ("draft", "gates", "kept", "is_decided"),
    [
        ([1, 0, 1], ViaGates(), 1, False),  # a drafted stop is the full target's to confirm
        ([1, 0, 1], ViaGates(escalates_stops=False), 3, True),
        ([1, 2, 2], ViaGates(), 1, False),  # a rewritten one as well
        ([1, 2, 2], ViaGates(escalates_stops=False, theta_escalate=0.2), 1, True),
        ([1], ViaGates(has_bonus=True), 1, False),  # and one behind the block
    ],
)
def test_stops_are_escalated(draft, gates, kept, is_decided):
    values = ([0.1, 0.8, 0.1], [0.7, 0.1, 0.2], [0.1, 0.8, 0.1], EASY)[: len(draft) + 1]
    routed = route(scored(draft, *values), gates, stop_ids=frozenset({0}))
    assert (routed.num_kept, routed.verdict is not None) == (kept, is_decided)


@given(blocks(), THETAS)
def test_one_threshold_and_an_empty_mask_are_the_plain_gate(scores: ScoreTable, theta: float) -> None:
    """With every layer kept the slim rows are the full ones, and VIA, ASD and CSD are one gate on the regret."""
    gates = ViaGates(theta_accept=theta, theta_escalate=theta, has_bonus=True, min_confidence=0.0)
    expected = accept_prefix(scores, scores.regret <= -math.log(theta))
    if len(scores.draft_ids) == 0:
        return  # a full pass by itself
    routed = route(with_sums(scores), gates)
    rest = StrictRule().judge(scores.drop(routed.num_kept), Ledger())
    verdict = routed.verdict or behind(routed.num_kept, rest)
    assert (verdict.num_accepted, verdict.next_id) == (expected.num_accepted, expected.next_id)


@given(blocks(), st.floats(0.0, 1.0))
def test_always_escalating_is_the_full_rule(scores: ScoreTable, confidence: float) -> None:
    gates = ViaGates(theta_accept=1.5, theta_escalate=1.5, min_confidence=confidence)
    if len(scores.draft_ids):
        routed = route(with_sums(scores), gates)
        assert (routed.num_kept, routed.verdict) == (0, None)
        strict = StrictRule().judge(scores, Ledger())
        assert behind(0, StrictRule().judge(scores.drop(0), Ledger())) == strict


@given(blocks(), THETAS, THETAS, st.floats(0.0, 1.0))
def test_a_lower_theta_escalate_never_adds_a_full_pass(
    scores: ScoreTable, one: float, other: float, confidence: float
) -> None:
    low, high = sorted((one, other))
    if len(scores.draft_ids):
        decided = [
            route(with_sums(scores), ViaGates(theta_accept=0.995, theta_escalate=theta, min_confidence=confidence))
            for theta in (low, high)
        ]
        assert decided[0].num_kept == decided[1].num_kept
        assert decided[0].verdict is not None or decided[1].verdict is None


@given(blocks(), THETAS)
def test_a_route_judges_twice_alike_and_always_progresses(scores: ScoreTable, theta: float) -> None:
    if len(scores.draft_ids):
        routed = route(with_sums(scores), ViaGates(theta_accept=theta, theta_escalate=theta / 2))
        assert routed == route(with_sums(scores), ViaGates(theta_accept=theta, theta_escalate=theta / 2))
        assert routed.verdict is None or len(routed.verdict.tiers) >= 1


def test_the_rest_s_exceptions_are_at_their_places_in_the_block():
    exception = ExceptionRecord(1, 5, 6, regret=0.25)
    verdict = behind(2, Verdict(2, 7, ("accepted", "exception", "recovered"), (exception,)))
    assert verdict.num_accepted == 4
    assert verdict.tiers == ("slim", "slim", "accepted", "exception", "recovered")
    assert verdict.exceptions == (replace(exception, index=3),)


@pytest.mark.parametrize(("accept", "escalate"), [(0.4, 0.5), (0.5, 0.0), (-1.0, -1.0)])
def test_thresholds_out_of_order_are_refused(accept: float, escalate: float) -> None:
    with pytest.raises(ValueError, match="theta_accept"):
        ViaGates(theta_accept=accept, theta_escalate=escalate)
