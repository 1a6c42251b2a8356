"""Calibration of ASD and CSD, and the numbers of an audit."""

from dataclasses import replace

import numpy as np
import pytest

from serving.config_rules import Calibration
from serving.decode.offline import complete
from serving.errors import DrafthouseError
from serving.memory.correction import pair_of
from serving.memory.drift import EDGES, LEAST_MISMATCHES, NUM_BINS, bin_of, drift, shares_of
from serving.requests import Receipt, SlimReceipt
from serving.rules.book import RuleBook
from serving.types import ExceptionRecord, as_ids
from tests.decode.scripted import arithmetic, make_scheduler, oracle, request
from tests.decode.test_lossy import NearModel
from tests.rules.blocks import table
from tuning import asd, csd
from tuning.audit import Judged, arm_numbers, first_divergence, paired_numbers
from tuning.audit_records import Answer, ArmRun, Group
from tuning.bootstrap import Interval, mean, ratio
from tuning.mismatches import Mismatch, RecordingBook, calibration_of
from tuning.scoring import discrepancies, false_totals


def test_asd_is_calibrated_to_the_first_quartile_of_normalised_regret_per_token() -> None:
    regrets = np.linspace(0.1, 4.0, 40)
    found = [Mismatch(4, place % 4, 1, 2, float(r)) for place, r in enumerate(regrets)]
    ratios = [r / ((4 - place % 4) / 4) for place, r in enumerate(regrets)]
    rule = asd.calibrated([*found, Mismatch(4, 0, 1, 2, float("inf")), Mismatch(4, 0, 1, 2, 0.0)], provenance="here")
    assert rule.budget == rule.gate == pytest.approx(np.percentile(ratios, 25), abs=1e-6)
    assert (rule.max_exceptions, rule.q) == (1, "normalised")
    assert rule.calibration is not None
    assert rule.calibration.num_mismatches == 41  # ties count, the impossible does not
    with pytest.raises(DrafthouseError, match="only 5 drafted tokens were rejected"):
        asd.calibrated(found[:5], provenance="")


def test_csd_counts_pairs_but_those_of_stops() -> None:
    found = [Mismatch(4, 0, 1, 2, 0.5)] * 3 + [Mismatch(4, 1, 2, 1, 0.5), Mismatch(4, 1, 9, 1, 0.5)]
    counts = csd.count_pairs(found, held_ids=frozenset({9}), max_pairs=10)
    assert counts.seen == {pair_of(1, 2): 3, pair_of(2, 1): 1}
    assert csd.count_pairs(found, held_ids=frozenset(), max_pairs=1).seen == {pair_of(1, 2): 3}


@pytest.mark.parametrize(("counts", "share"), [([], 0.0), ([5], 1.0), ([16, 1, 1, 1, 1], 0.8), ([1] * 10, 0.2)])
def test_the_share_of_the_most_frequent_fifth_of_pairs(counts: list[int], share: float) -> None:
    assert csd.pareto_share(counts) == share


def test_a_recording_has_every_first_rejection_and_changes_nothing() -> None:
    outputs = []
    book = RecordingBook()
    for rules in (RuleBook(), book):
        scheduler = make_scheduler(NearModel(arithmetic), oracle(arithmetic, right=1), max_draft=4, rules=rules)
        outputs.append([done.output_ids for done in complete(scheduler, [request("a", max_tokens=20)])])
    assert outputs[0] == outputs[1]
    found = book.found["a"]
    assert {(one.size, one.place, one.draft_id - one.target_id) for one in found} >= {(4, 1, 1)}
    assert len(found) == sum(scheduler.stats.first_mismatches)


def test_histograms() -> None:
    assert [bin_of(r) for r in (0.0, EDGES[0], 1.0, 99.0)] == [0, 1, 6, NUM_BINS - 1]
    assert drift(shares_of([1, 1, 0]), shares_of([1, 1, 0])) == 0.0
    assert drift(shares_of([1, 0, 0]), shares_of([0, 0, 5])) == 1.0
    made = calibration_of([Mismatch(4, 0, 1, 2, 0.5)] * 4, provenance="p")
    assert isinstance(made, Calibration)
    assert made.shares[bin_of(0.5)] == 1.0
    assert calibration_of([], provenance="p") is None


def test_intervals_hold_the_estimate_and_shrink_with_prompts() -> None:
    rng = np.random.default_rng(0)
    few, many = (mean(rng.normal(1.0, 1.0, size).tolist()) for size in (20, 2000))
    assert few is not None
    assert many is not None
    assert few.low <= few.value <= few.high
    assert many.high - many.low < 0.3 * (few.high - few.low)
    two_to_one = ratio([2.0] * 8, [1.0] * 8)
    assert two_to_one is not None
    assert (two_to_one.value, two_to_one.low, two_to_one.high) == (2.0, 2.0, 2.0)
    assert mean([1.0] * 5) == Interval(1.0, None, None)
    assert mean([]) is None
    assert ratio([], []) is None
    assert ratio([1.0], [0.0]) is None


@pytest.mark.parametrize(
    ("a", "b", "at"), [((), (), None), ((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1)]
)
def test_first_divergence(a: tuple[int, ...], b: tuple[int, ...], at: int | None) -> None:
    assert first_divergence(a, b) == at


def test_a_fresh_pass_finds_what_a_receipt_hides_or_makes_up() -> None:
    rows = np.array([[1.0, 0.5, 0.0], [1.0, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=np.float32)
    scores = table([0, 1], rows)
    told = ExceptionRecord(1, 1, 0, 0.5)
    assert discrepancies(scores, [told]) == []
    for wrong in (
        [],
        [ExceptionRecord(1, 1, 2, 0.5)],
        [ExceptionRecord(1, 1, 0, 0.6)],
        [told, ExceptionRecord(0, 2, 0, 1.0)],
    ):
        assert len(discrepancies(scores, wrong)) == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"regret_spent": 0.5}, "regret_spent is 0.5, its exceptions make 0.75"),
        ({"num_exceptions": 1}, "num_exceptions is 1, its exceptions make 2"),
        ({"rescues": 2}, "rescues is 2, its exceptions make 1"),
        ({"budget": 0.6}, "budget is 0.6, its exceptions cost 0.75"),
    ],
)
def test_totals_that_are_not_those_of_the_exceptions_are_found(wrong: dict[str, float], said: str) -> None:
    listed = [ExceptionRecord(1, 1, 0, 0.5), ExceptionRecord(4, 2, 0, 0.25, count=7)]
    honest = Receipt(budget=8.0, regret_spent=0.75, num_exceptions=2, rescues=1)
    assert false_totals(honest, listed) == false_totals(replace(honest, budget=None), listed) == []
    (problem,) = false_totals(replace(honest, **wrong), listed)  # type: ignore[arg-type]
    assert said in problem


def answer(name: str, ids: tuple[int, ...], **receipt: object) -> Answer:
    told = Receipt(rounds=2, target_passes=2, emitted=len(ids), **receipt)  # type: ignore[arg-type]
    return Answer(
        prompt_id=name,
        prompt_ids=(1,),
        output_ids=ids,
        text="",
        finish_reason="length" if len(ids) == 4 else "stop",
        receipt=told,
        exceptions=(),
        tiers=("bonus",) * len(ids),
    )


def run(seconds: float, *answers: Answer, num_drafts: int = 0, accepted_at: tuple[int, ...] = ()) -> ArmRun:
    return ArmRun(
        seconds=seconds, answers=answers, num_drafts=num_drafts, accepted_at=accepted_at,
        first_mismatches=tuple(as_ids([1] + [0] * (NUM_BINS - 1)).tolist()),
    )  # fmt: skip


def test_the_numbers_of_an_audit() -> None:
    work = {"slim": SlimReceipt(passes=3), "drafted": 4, "accepted": 2, "draft_passes": 6}
    lossy = work | {"budget": 8.0, "regret_spent": 2.0, "num_exceptions": 1, "exhausted_at": 3}
    groups = [
        Group(
            key="k",
            number=0,
            runs={
                "plain": run(4.0, answer("a", (1, 2, 3, 4)), answer("b", (5, 6))),
                "strict": run(2.0, answer("a", (1, 2, 3, 4)), answer("b", (5, 6)), num_drafts=4, accepted_at=(2, 1)),
                "mine": run(
                    1.0,
                    answer("a", (1, 2, 9, 4), **lossy),
                    answer("b", (5, 6), **lossy),
                    num_drafts=4,
                    accepted_at=(3, 1),
                ),
            },
        )
    ]
    judged = {
        (arm, name): Judged(-size - (arm == "mine"), (), solved=name == "a" or arm == "mine")
        for arm in ("plain", "strict", "mine")
        for name, size in (("a", 4), ("b", 2))
    }
    mine = arm_numbers("mine", groups, judged)
    assert (mine.tokens, mine.tokens_per_s, mine.accepted_length, mine.accepted_at) == (6, 6.0, 1.0, [0.75, 0.25])
    assert (mine.tokens_per_target_pass, mine.cycles_per_1k_tokens) == (1.5, pytest.approx(666.6667))
    assert (mine.regret_share_of_budget, mine.exceptions_per_request, mine.exhausted_at_median) == (0.25, 1.0, 3)
    assert (mine.exhausted_requests, str(mine.exhausted_at_median)) == (1.0, "3.0")
    assert arm_numbers("strict", groups, judged).exhausted_requests is None  # nothing to exhaust
    assert mine.tier_shares == {"bonus": 1.0}
    assert (mine.slim_passes_per_token, mine.draft_passes_per_token, mine.cut_by_max_tokens) == (1.0, 2.0, 0.5)
    calibration = calibration_of([Mismatch(4, 0, 1, 2, 9.0)], provenance="")
    paired = paired_numbers("mine", groups, judged, tasks={"a": "gsm8k", "b": "gsm8k"}, calibration=calibration)
    assert paired.identical_to_strict is not None
    assert paired.identical_to_strict.value == 0.5
    assert str(paired.first_divergence_median) == "2.0"
    assert paired.speed_ratio_to_strict == Interval(2.0, None, None)  # of one group nothing can be resampled
    many = paired_numbers("mine", groups * 6, judged, tasks={}, calibration=None).speed_ratio_to_strict
    assert many == Interval(2.0, 2.0, 2.0)
    assert (str(many), str(paired.speed_ratio_to_strict)) == ("2.000 [2.000, 2.000]", "2.000, no interval")
    assert paired.log_likelihood_difference is not None
    assert paired.log_likelihood_difference.value == pytest.approx(-0.375)
    assert paired.drift_from_calibration is None  # of so few mismatches any two would differ
    enough = paired_numbers("mine", groups * LEAST_MISMATCHES, judged, tasks={}, calibration=calibration)
    assert enough.drift_from_calibration == 1.0
    assert paired.task_scores["gsm8k"]["difference"].value == 0.5
    poor = {key: Judged(one.log_likelihood, (), solved=key[0] == "mine") for key, one in judged.items()}
    scores = paired_numbers("mine", groups, poor, tasks={"a": "gsm8k"}, calibration=None).task_scores
    assert set(scores["gsm8k"]) == {"prompts", "strict"}  # strict reaches nothing: no signal
