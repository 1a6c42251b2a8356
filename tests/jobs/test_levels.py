"""What a load test concludes, with literal numbers."""

from jobs.figures import Spread, Timing
from jobs.levels import Turn, summarise, turn_of
from jobs.load import Counts, LevelRun, Sample

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
    run = LevelRun(1, 1.0, SAMPLES[2:])
    level = summarise(run)
    assert (level.tokens_per_s, level.ttft_ms, level.tpot_ms, level.accepted_length) == (0.0, None, None, None)
    assert level.hop_cost is None
    assert turn_of(run, [10.0]) is None


def test_the_way_is_priced_turn_by_turn() -> None:
    run = LevelRun(2, 4.0, SAMPLES)
    turns = [turn for turn in (turn_of(run, [140.0, 160.0, None]), Turn(100.0, 90.0), Turn(100.0, 60.0)) if turn]
    assert turns[0] == Turn(200.0, 150.0)
    assert turn_of(run, [None]) is None
    level = summarise(run, turns)
    assert level.hop_cost == 0.25
    assert level.row["hop cost"] == "25.0%"
    assert summarise(run).row["hop cost"] is None
