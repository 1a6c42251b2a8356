"""Where the time of a request went, and what the counters say beside it."""

import queue
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from serving.decode.engine import Engine
from serving.decode.limits import SchedulerLimits
from serving.decode.stats import EngineStats
from serving.decode.timing import MAX_KEPT, RequestLog, RequestTimes
from serving.protocols import DraftRequest, ScoreRequest
from serving.requests import Chunk, Receipt
from serving.types import Draft, ScoreTable, as_ids
from tests.decode.scripted import ScriptedDrafter, ScriptedModel, arithmetic, make_scheduler, oracle, request

DONE = RequestTimes(
    reason="length", ingress_s=0.5, submitted_s=10.0, admitted_s=12.0, first_token_s=15.0, finished_s=17.0, draft_s=1.0,
    num_tokens=5, is_resumed=False,
)  # fmt: skip


def last_chunk(name: str) -> Chunk:
    return Chunk(name, (1,), "", Receipt(), finish_reason="length")


def test_the_parts_add_up_to_the_time_to_the_first_token() -> None:
    assert DONE.first_token_parts == {"ingress": 0.5, "queue": 2.0, "draft": 1.0, "verify": 2.0}
    assert (DONE.latency_s, DONE.token_s) == (7.5, 0.5)


@pytest.mark.parametrize("lacks", [{"admitted_s": None}, {"first_token_s": None}, {"is_resumed": True}])
def test_without_a_first_token_here_there_are_no_parts(lacks: dict[str, object]) -> None:
    assert replace(DONE, **lacks).first_token_parts == {}


@pytest.mark.parametrize("lacks", [{"num_tokens": 1}, {"first_token_s": None}])
def test_one_token_has_no_time_between_tokens(lacks: dict[str, object]) -> None:
    assert replace(DONE, **lacks).token_s is None


class Slow(ScriptedModel):
    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreTable | None]:
        time.sleep(0.02)
        return super().score(requests)


def slow_guess(request: DraftRequest) -> list[int]:
    time.sleep(0.03)
    return [0]


def test_the_engine_tells_queue_draft_and_verify_apart() -> None:
    """Three requests for two places: the third waits for the first, and its prompt for the second one's drafts."""
    limits = SchedulerLimits(max_sessions=2, max_length=128, max_queued=4, max_draft=1)
    engine = Engine(make_scheduler(Slow(arithmetic, 2), ScriptedDrafter(slow_guess), max_sessions=2), limits)
    engine.start()
    ends: queue.Queue[Chunk] = queue.Queue()
    for name, max_tokens in (("first", 3), ("long", 9), ("second", 3)):
        asked = replace(request(name, max_tokens=max_tokens), received_s=time.time() - 0.2)
        engine.submit(asked, lambda chunk: ends.put(chunk) if chunk.finish_reason else None)
    for _ in range(3):
        ends.get(timeout=10)
    first, second, _ = engine.drain_times()
    engine.stop()
    assert engine.drain_times() == []
    parts = second.first_token_parts
    # sleeps last at least as long as they say, so these bounds hold on a busy machine too
    assert parts["ingress"] >= 0.2
    assert parts["queue"] >= first.finished_s - first.submitted_s - 0.01
    assert parts["verify"] >= 3 * 0.02
    assert parts["draft"] >= 0.03
    assert (second.reason, second.num_tokens, second.is_complete) == ("length", 3, True)
    assert second.token_s is not None
    assert second.token_s >= 0.02


def test_a_request_that_is_cancelled_while_it_waits_was_never_admitted() -> None:
    log = RequestLog(EngineStats())
    log.watch(request("a"), lambda _: None)(Chunk("a", (), "", Receipt(), finish_reason="cancelled"))
    (times,) = log.drain()
    assert (times.reason, times.admitted_s, times.num_tokens) == ("cancelled", None, 0)
    assert not times.is_complete


def test_a_clock_that_is_behind_the_gateway_s_makes_no_negative_time() -> None:
    log = RequestLog(EngineStats())
    log.watch(replace(request("a"), received_s=time.time() + 60), lambda _: None)(last_chunk("a"))
    assert log.drain()[0].ingress_s == 0.0


def test_a_resumed_request_had_its_first_token_elsewhere() -> None:
    log = RequestLog(EngineStats())
    resumed = replace(request("a"), receipt=Receipt(resumed=1))  # its replica died before there was a token
    log.watch(resumed, lambda _: None)(last_chunk("a"))
    assert log.drain()[0].is_resumed


def test_what_nobody_drains_is_bounded() -> None:
    log = RequestLog(EngineStats())
    for number in range(MAX_KEPT + 5):
        log.watch(request(f"r{number}"), lambda _: None)(last_chunk(f"r{number}"))
    assert len(log.drain()) == MAX_KEPT


def test_drafts_positions_and_prompts_are_counted() -> None:
    from serving.decode.offline import complete

    scheduler = make_scheduler(ScriptedModel(arithmetic), oracle(arithmetic, right=2), max_draft=3)
    (done,) = complete(scheduler, [request("a", max_tokens=13)])
    stats = scheduler.stats
    # a plain token, then blocks of two accepted and one recovered
    assert (stats.num_drafts, stats.drafts_empty, stats.rounds) == (4, 1, 5)
    assert stats.accepted_at == [4, 4]
    assert stats.accepted == sum(stats.accepted_at) == done.receipt.accepted
    assert (stats.prompt_tokens, stats.emitted, stats.draft_limit) == (2, 13, 3)


def test_a_copy_is_a_copy() -> None:
    stats = EngineStats()
    stats.count_draft(Draft(as_ids([7] * 3), "model"), num_accepted=1, num_emitted=2)
    copied = stats.copy()
    stats.count_draft(Draft(as_ids([7] * 3), "model"), num_accepted=2, num_emitted=3)
    assert (copied.drafted, copied.accepted, copied.accepted_at) == (3, 1, [1])
