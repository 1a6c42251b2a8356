"""From scripted rounds to what the metrics show."""

import math
from dataclasses import replace

import pytest
from pydantic import ValidationError

from serving.config_rules import AsdRule, Calibration
from serving.decode.offline import complete
from serving.deploy import metric_table as m
from serving.deploy.drift_watch import DriftWatch
from serving.deploy.hops import Hops
from serving.deploy.metric_table import METRICS
from serving.deploy.readings import WINDOW_S, Publisher
from serving.memory.drift import LEAST_MISMATCHES, NUM_BINS
from serving.rules.book import RuleBook
from tests.decode.scripted import ScriptedDrafter, ScriptedModel, arithmetic, make_scheduler, oracle, request
from tests.decode.test_lossy import NearModel
from tests.decode.test_timing import DONE
from tests.deploy.metered import Meters, reading_of


@pytest.fixture
def meters():
    return Meters()


@pytest.fixture
def publisher(meters):
    return Publisher(meters)


def run(scheduler, name="a", max_tokens=13):
    list(complete(scheduler, [request(name, max_tokens=max_tokens)]))


def test_names_are_unique_and_as_prometheus_and_ray_want_them():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(metric.name.startswith(("vllm_", "drafthouse_")) and ":" not in metric.name for metric in METRICS)
    assert all(bool(metric.boundaries) == (metric.kind == "histogram") for metric in METRICS)
    assert all(list(metric.boundaries) == sorted(set(metric.boundaries)) for metric in METRICS)


def test_counters_show_the_sums_however_often_they_are_published(publisher, meters):
    scheduler = make_scheduler(ScriptedModel(arithmetic), oracle(arithmetic, right=2), max_draft=3)
    for time_s, name in enumerate("abc"):
        run(scheduler, name)
        publisher.publish(reading_of(scheduler, time_s=time_s))
        publisher.publish(reading_of(scheduler, time_s=time_s + 0.5))
    stats = scheduler.stats
    assert meters.counts == {
        (m.NUM_DRAFTS.name, None): 12,
        (m.NUM_DRAFT_TOKENS.name, None): stats.drafted,
        (m.NUM_ACCEPTED_TOKENS.name, None): 24,
        (m.DRAFTS_BY_SOURCE.name, "model"): 12,
        (m.NUM_ACCEPTED_AT.name, "0"): 12,
        (m.NUM_ACCEPTED_AT.name, "1"): 12,
        (m.PROMPT_TOKENS.name, None): 6,
        (m.GENERATION_TOKENS.name, None): 39,
        (m.DRAFTS_EMPTY.name, None): 3,
        (m.ROUNDS.name, None): 15,
        (m.TARGET_PASSES.name, None): 15,
        (m.TARGET_ROWS.name, None): stats.target_rows,
        (m.FIRST_MISMATCHES.name, "0.02"): 9,
        (m.REPLACED_TOKENS.name, None): 9,
    }
    assert meters.gauges[m.ACCEPTED_LENGTH.name] == 2.0
    assert meters.gauges[m.ACCEPTANCE_RATE.name] == stats.acceptance_rate
    assert meters.gauges[m.SPECULATION_K.name] == 3
    assert meters.gauges[m.QUEUE_LIMIT.name] == 8


def test_case_20_the_published_rate_excludes_the_bonus(publisher, meters):
    scheduler = make_scheduler(ScriptedModel(arithmetic), oracle(arithmetic), max_draft=3)
    run(scheduler)
    publisher.publish(reading_of(scheduler, time_s=0.0))
    assert meters.gauges[m.ACCEPTANCE_RATE.name] == 1.0
    assert meters.counts[m.GENERATION_TOKENS.name, None] > meters.counts[m.NUM_ACCEPTED_TOKENS.name, None]


def test_without_drafts_no_rate_is_claimed(publisher, meters):
    scheduler = make_scheduler(ScriptedModel(arithmetic), ScriptedDrafter(lambda _: []))
    run(scheduler)
    publisher.publish(reading_of(scheduler, time_s=0.0))
    assert all(math.isnan(meters.gauges[metric.name]) for metric in (m.ACCEPTANCE_RATE, m.ACCEPTED_LENGTH, m.HOP_MS))
    assert meters.counts[m.DRAFTS_EMPTY.name, None] == 13


def test_shares_are_of_the_last_minute(publisher, meters):
    scheduler = make_scheduler(ScriptedModel(arithmetic), oracle(arithmetic))
    hops = [Hops(10, 0.5, 0.2), Hops(20, 0.7, 0.3), Hops(20, 0.7, 0.3)]
    shown = []
    for number, sums in enumerate(hops):
        publisher.publish(reading_of(scheduler, time_s=number * WINDOW_S, hops=sums))
        shown.append((meters.gauges[m.HOP_MS.name], meters.gauges[m.DRAFT_MS.name]))
    assert shown[:2] == [pytest.approx((30.0, 20.0)), pytest.approx((10.0, 10.0))]
    assert all(math.isnan(share) for share in shown[2])  # no call in the last minute


def test_a_share_ends_with_what_it_is_of(publisher, meters):
    scheduler = make_scheduler(ScriptedModel(arithmetic), oracle(arithmetic))
    run(scheduler)
    for number in range(3):
        publisher.publish(reading_of(scheduler, time_s=number * WINDOW_S))
    assert math.isnan(meters.gauges[m.ACCEPTANCE_RATE.name])
    run(scheduler)
    publisher.publish(reading_of(scheduler, time_s=3 * WINDOW_S))
    assert meters.gauges[m.ACCEPTANCE_RATE.name] == 1.0


def test_a_slim_verifiers_hop_is_its_own(publisher, meters):
    scheduler = make_scheduler(ScriptedModel(arithmetic), oracle(arithmetic))
    slim_hops = Hops(10, 0.5, 0.2)
    publisher.publish(replace(reading_of(scheduler, time_s=0.0), slim_hops=slim_hops))
    assert meters.gauges[m.SLIM_HOP_MS.name] == pytest.approx(30.0)
    assert math.isnan(meters.gauges[m.HOP_MS.name])


def test_a_pass_of_the_target_is_timed_by_itself(publisher, meters):
    scheduler = make_scheduler(ScriptedModel(arithmetic), oracle(arithmetic))
    stats = scheduler.stats
    stats.rounds, stats.verify_s, stats.forwards, stats.forward_s = 10, 5.0, 4, 0.8
    publisher.publish(reading_of(scheduler, time_s=0.0))
    assert meters.gauges[m.FORWARD_MS.name] == pytest.approx(200.0)


def test_a_level_is_as_of_now(publisher, meters):
    scheduler = make_scheduler(ScriptedModel(arithmetic), oracle(arithmetic), max_sessions=2)
    for name in "abc":
        scheduler.submit(request(name), lambda _: None)
    scheduler.step()
    publisher.publish(reading_of(scheduler, time_s=0.0))
    assert (meters.gauges[m.NUM_RUNNING.name], meters.gauges[m.NUM_WAITING.name]) == (2, 1)
    assert meters.gauges[m.DEGRADED.name] == 0.0


def test_a_request_is_observed_once_when_it_has_ended(publisher, meters):
    scheduler = make_scheduler(ScriptedModel(arithmetic), oracle(arithmetic))
    publisher.publish(reading_of(scheduler, time_s=0.0, ended=[DONE]))
    publisher.publish(reading_of(scheduler, time_s=1.0))
    assert meters.counts[m.REQUEST_SUCCESS.name, "length"] == 1
    assert meters.observed == {
        (m.FIRST_TOKEN_S.name, None): [5.5],
        (m.FIRST_TOKEN_PART_S.name, "ingress"): [0.5],
        (m.FIRST_TOKEN_PART_S.name, "queue"): [2.0],
        (m.FIRST_TOKEN_PART_S.name, "draft"): [1.0],
        (m.FIRST_TOKEN_PART_S.name, "verify"): [2.0],
        (m.REQUEST_S.name, None): [7.5],
        (m.TOKEN_S.name, None): [0.5],
    }


@pytest.mark.parametrize(("reason", "label"), [("cancelled", "abort"), ("error", "error")])
def test_a_request_that_was_cut_off_says_nothing_of_latency(publisher, meters, reason, label):
    scheduler = make_scheduler(ScriptedModel(arithmetic), oracle(arithmetic))
    publisher.publish(reading_of(scheduler, time_s=0.0, ended=[replace(DONE, reason=reason, first_token_s=None)]))
    assert meters.counts[m.REQUEST_SUCCESS.name, label] == 1
    assert meters.observed == {}


def test_what_a_lossy_rule_did_goes_by_its_profile(meters):
    publisher = Publisher(meters, profile="mine")
    rules = RuleBook(AsdRule(budget=1.0, gate=1.0))
    scheduler = make_scheduler(NearModel(arithmetic), oracle(arithmetic, right=1), max_draft=4, rules=rules)
    run(scheduler, max_tokens=20)
    for time_s in (0.0, 1.0):
        publisher.publish(reading_of(scheduler, time_s=time_s))
    stats = scheduler.stats
    assert meters.counts[m.EXCEPTIONS.name, "mine"] == stats.exceptions == 4
    assert meters.counts[m.REGRET.name, "mine"] == 1.0
    assert meters.counts[m.EXHAUSTED.name, "mine"] == stats.exhausted > 0
    assert meters.counts[m.FIRST_MISMATCHES.name, "0.5"] == sum(stats.first_mismatches)
    assert m.RESCUES.name not in {name for name, _ in meters.counts}
    assert m.DRIFT.name not in meters.gauges


def test_drift_is_told_once_there_is_enough_and_forgets_what_is_long_ago():
    expected = [0.0] * NUM_BINS
    expected[0] = 1.0
    watch, totals, found = DriftWatch(expected), [0] * NUM_BINS, []
    for number in range(20):
        totals[0 if number < 10 else 3] += LEAST_MISMATCHES // 4
        found.append(watch.look(totals))
    assert found[:3] == [None] * 3
    assert found[3:10] == [0.0] * 7
    assert found[10:13] == [0.25, 0.5, 0.75]
    assert found[13:] == [1.0] * 7


def test_a_calibrated_profile_shows_how_far_its_traffic_has_drifted(meters):
    expected = [0.0] * NUM_BINS
    expected[0] = 1.0
    publisher = Publisher(meters, profile="mine", calibrated=expected)
    scheduler = make_scheduler(ScriptedModel(arithmetic), oracle(arithmetic))
    publisher.publish(reading_of(scheduler, time_s=0.0))
    assert m.DRIFT.name not in meters.gauges
    scheduler.stats.first_mismatches[0] = scheduler.stats.first_mismatches[3] = LEAST_MISMATCHES // 2
    publisher.publish(reading_of(scheduler, time_s=1.0))
    assert meters.gauges[m.DRIFT.name] == 0.5


def test_a_calibration_has_a_share_for_each_bin():
    flat = (1 / NUM_BINS,) * NUM_BINS
    assert Calibration(num_mismatches=9, shares=flat).shares == flat
    for wrong in (flat[1:], (*flat, 0.0)):
        with pytest.raises(ValidationError, match=f"{NUM_BINS} items"):
            Calibration(num_mismatches=9, shares=wrong)
