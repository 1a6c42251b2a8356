"""What a load test concludes, with literal numbers."""

import json
from pathlib import Path

import pytest

from jobs.figures import Spread, Timing
from jobs.levels import Baseline, read_baseline, summarise
from jobs.load import Counts, LevelRun, Sample
from serving.errors import ConfigError

SAMPLES = (
    Sample("a", Timing(5, 0.1, 0.5), Counts(accepted=3, rounds=4, drafts_empty=2)),  # 100 ms a token
    Sample("b", Timing(3, 0.3, 0.9), Counts(accepted=1, rounds=3, drafts_empty=1)),  # 300 ms
    Sample("c", Timing(0, None, None), error="HTTP 429: full"),
)


def test_a_level_counts_answers_and_keeps_the_rest_as_errors() -> None:
    level = summarise(LevelRun(2, 4.0, SAMPLES))
    assert (level.concurrency, level.requests, level.errors, level.first_error) == (2, 3, 1, "HTTP 429: full")
    assert level.tokens_per_s == 2.0
    assert level.ttft_ms == Spread(200.0, 290.0)
    assert level.tpot_ms == Spread(200.0, 290.0)
    assert level.latency_s == Spread(0.7, 0.88)
    assert level.accepted_length == 1.0
    assert level.hop_cost is None
    assert [(raw.prompt_id, raw.tokens, raw.error) for raw in level.raw] == [
        ("a", 5, None),
        ("b", 3, None),
        ("c", 0, "HTTP 429: full"),
    ]


def test_a_level_without_any_answer_has_no_figures() -> None:
    level = summarise(LevelRun(1, 1.0, SAMPLES[2:]), Baseline("plain", 1, 10.0))
    assert (level.tokens_per_s, level.ttft_ms, level.tpot_ms, level.accepted_length) == (0.0, None, None, None)
    assert level.hop_cost is None


@pytest.mark.parametrize(("concurrency", "hop_cost"), [(2, 0.25), (1, None), (4, None)])
def test_the_hop_is_priced_where_the_batch_matches(concurrency: int, hop_cost: float | None) -> None:
    level = summarise(LevelRun(concurrency, 4.0, SAMPLES), Baseline("plain", 2, 150.0))
    assert level.hop_cost == hop_cost
    assert level.row["hop cost"] == (None if hop_cost is None else "25.0%")


def report(path: Path, **meta: object) -> Path:
    runs = [{"name": "plain", "tpot_ms": {"p50": 20.5, "p95": 30.0}}, {"name": "short", "tpot_ms": None}]
    path.write_text(json.dumps({"meta": meta, "runs": runs}))
    return path


def test_a_baseline_is_one_run_of_a_report(tmp_path: Path) -> None:
    assert read_baseline(report(tmp_path / "b.json", batch=4), "plain") == Baseline("plain", 4, 20.5)


@pytest.mark.parametrize(
    ("name", "meta", "said"),
    [
        ("nope", {"batch": 1}, "--against-name: .* has no run 'nope'; it has plain, short"),
        ("short", {"batch": 1}, "--against: run 'short' of .* has no time per token"),
        ("plain", {}, "--against: .* is no report of an in-process bench: meta.batch"),
    ],
)
def test_a_report_without_it_is_refused(tmp_path: Path, name: str, meta: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_baseline(report(tmp_path / "b.json", **meta), name)


def test_a_report_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--against: .* cannot be read: No such file"):
        read_baseline(tmp_path / "none.json", "plain")
