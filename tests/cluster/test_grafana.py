"""The dashboard and the alert rules speak of metrics that there are, and a useless drafter sets one off."""

import json
import operator
import re
from pathlib import Path

import pytest
import yaml

from serving.app import AppArgs
from serving.decode.offline import complete
from serving.deploy import metric_table as m
from serving.deploy.metric_table import METRICS
from serving.deploy.readings import WINDOW_S, Publisher
from tests.decode.scripted import ScriptedModel, arithmetic, make_scheduler, oracle, request
from tests.deploy.metered import Meters, reading_of

FOLDER = Path(__file__).parents[2] / "cluster" / "grafana"
DASHBOARD = json.loads((FOLDER / "drafthouse.json").read_text())
RULES = {rule["alert"]: rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
         for rule in group["rules"]}  # fmt: skip
PANELS = {f"{panel['title']} {target['refId']}": target["expr"]
          for panel in DASHBOARD["panels"] for target in panel["targets"]}  # fmt: skip
EXPRESSIONS = PANELS | {name: rule["expr"] for name, rule in RULES.items()}
SERIES = {series: metric for metric in METRICS for series in metric.exported}
EXPORT_S = 10.0  # Ray's own
SERVE_LABELS = {"deployment", "replica", "application"}


def series_in(expression):
    return set(re.findall(r"\bray_\w+", expression))


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_names_metrics_and_labels_that_there_are(name):
    used = series_in(EXPRESSIONS[name])
    assert used
    assert used <= SERIES.keys()
    own_labels = {SERIES[series].label for series in used} - {None}
    has_buckets = any(series.endswith("_bucket") for series in used)
    grouped = re.findall(r"(?:by|on|ignoring) \(([\w, ]*)\)", EXPRESSIONS[name])
    labels = {label.strip() for group in grouped for label in group.split(",")}
    assert labels <= SERVE_LABELS | own_labels | ({"le"} if has_buckets else set())


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_sums_are_read_as_rates_and_levels_are_not(name):
    for series in series_in(EXPRESSIONS[name]):
        is_rate = re.search(rf"rate\({series}\b", EXPRESSIONS[name]) is not None
        assert is_rate == (SERIES[series].kind != "gauge")


def test_a_stalled_target_is_told_of_before_it_is_replaced():
    rule = RULES["DrafthouseStalled"]
    threshold_s, held_s = float(rule["expr"].rsplit(maxsplit=1)[1]), float(rule["for"].removesuffix("s"))
    assert threshold_s + held_s + EXPORT_S < AppArgs.model_fields["stall_limit_s"].default


def test_every_metric_is_on_the_dashboard():
    shown = {SERIES[series] for expression in PANELS.values() for series in series_in(expression)}
    assert shown == set(METRICS)


def test_a_rule_says_what_is_wrong_and_what_to_do():
    for rule in RULES.values():
        assert {"alert", "expr", "for", "labels", "annotations"} == rule.keys()
        assert rule["annotations"].keys() == {"summary", "action"}


def test_panels_do_not_overlap():
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def holds(expression, meters, *, drafts_a_second):
    """`gauge < number and on (replica) rate(counter[...]) > 0`, all that the rule is made of."""
    found = re.fullmatch(r"ray_(\w+) ([<>]) ([\d.]+) and on \(replica\) rate\(ray_(\w+)_total\[5m\]\) > 0", expression)
    gauge, sign, threshold, counter = found.groups()
    assert counter == m.NUM_DRAFTS.name
    below = {"<": operator.lt, ">": operator.gt}[sign](meters.gauges[gauge], float(threshold))
    return below and drafts_a_second > 0


def test_case_21_a_drafter_that_is_never_right_is_noticed():
    drafter = oracle(arithmetic)
    scheduler = make_scheduler(ScriptedModel(arithmetic), drafter)
    meters = Meters()
    publisher = Publisher(meters)
    rates, alarms = [], []
    for number in range(12):
        if number == 4:  # from now on the drafter is always wrong
            drafter.guess = oracle(arithmetic, right=0).guess
        before = scheduler.stats.num_drafts
        list(complete(scheduler, [request(f"r{number}")]))
        publisher.publish(reading_of(scheduler, time_s=number * WINDOW_S / 4))
        rates.append(meters.gauges[m.ACCEPTANCE_RATE.name])
        drafts = scheduler.stats.num_drafts - before
        alarms.append(holds(RULES["DrafthouseDrafterNeverRight"]["expr"], meters, drafts_a_second=drafts))
    assert rates[:4] == [1.0] * 4
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == 0.0
    assert alarms == [rate < 0.05 for rate in rates]
    assert alarms[-1]
    assert not alarms[3]
    assert not holds(RULES["DrafthouseDrafterNeverRight"]["expr"], meters, drafts_a_second=0)


def test_the_readme_names_every_metric():
    section = (FOLDER.parents[1] / "README.md").read_text().split("## Metrics\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`((?:vllm|drafthouse)_\w+)`", section))
    assert named == {metric.name for metric in METRICS}
