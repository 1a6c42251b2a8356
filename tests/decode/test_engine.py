"""The engine thread: chunks in order, cancellation, overload, and passes that fail."""

import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from serving.decode.engine import Engine
from serving.decode.limits import SchedulerLimits
from serving.errors import OverloadedError, RequestError
from serving.protocols import ScoreRequest
from serving.requests import Chunk
from serving.types import Ids, ScoreTable, as_ids
from tests.decode.scripted import ScriptedModel, arithmetic, make_scheduler, oracle, plain, request


class Fragile(ScriptedModel):
    """Fails as long as `is_broken`; is slow if asked to."""

    is_broken = False
    breaks_at: int | None = None
    pause_s = 0.0
    refuses = False
    holds_on = False

    def open(self, session_id: str, ids: Ids, *, salt: str = "") -> int:
        if self.refuses:
            raise KeyError("no free row")
        return super().open(session_id, ids, salt=salt)

    def close(self, session_id: str) -> None:
        self.open_sessions.pop(session_id, None)
        if self.holds_on:
            raise RuntimeError("cannot let go")

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreTable | None]:
        time.sleep(self.pause_s)
        if self.is_broken or self.num_passes == self.breaks_at:
            raise RuntimeError("out of memory")
        return super().score(requests)


@pytest.fixture
def model() -> Fragile:
    return Fragile(arithmetic)


@pytest.fixture
def engine(model: Fragile) -> Iterator[Engine]:
    limits = SchedulerLimits(max_sessions=2, max_length=128, max_queued=1, max_draft=4)
    engine = Engine(make_scheduler(model, oracle(arithmetic), max_sessions=2), limits)
    engine.start()
    yield engine
    engine.stop()


def collect(chunks: "queue.Queue[Chunk]") -> list[Chunk]:
    """All chunks of one request, to its end."""
    found = []
    while not found or found[-1].finish_reason is None:
        found.append(chunks.get(timeout=10))
    return found


def run(engine: Engine, name: str = "a", max_tokens: int = 20) -> list[Chunk]:
    chunks: queue.Queue[Chunk] = queue.Queue()
    engine.submit(request(name, max_tokens=max_tokens), chunks.put)
    return collect(chunks)


def test_a_request_streams_to_its_end(engine: Engine) -> None:
    chunks = run(engine)
    assert [token for chunk in chunks for token in chunk.ids] == plain(arithmetic, (5, 9), 20)
    assert engine.health.stalled_s == 0.0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"),
    [((), 5, "prompt"), ((1,), 0, "max_tokens"), ((1,) * 60, 69, "max_tokens")],
)
def test_case_24_what_cannot_fit_is_refused_and_the_loop_survives(
    engine: Engine, prompt: tuple[int, ...], max_tokens: int, field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        engine.submit(request("a", prompt=prompt, max_tokens=max_tokens), lambda _: None)
    assert caught.value.field == field
    assert len(run(engine)) > 0
    exact: queue.Queue[Chunk] = queue.Queue()
    engine.submit(request("exact", prompt=(1,) * 108, max_tokens=20), exact.put)
    assert collect(exact)[-1].finish_reason == "length"


def test_a_failing_pass_ends_its_requests_and_nothing_else(engine: Engine, model: Fragile) -> None:
    model.is_broken = True
    (last,) = run(engine)
    assert last.finish_reason == "error"
    assert last.error == "RuntimeError: out of memory"
    model.is_broken = False
    assert run(engine)[-1].finish_reason == "length"
    assert model.open_sessions == {}


def test_case_34_rounds_that_keep_failing_are_counted_until_one_settles(engine: Engine, model: Fragile) -> None:
    model.feed_passes = 2  # reading a prompt settles nothing: a failure behind it is not the first of a new run
    for number in range(4):
        model.breaks_at = model.num_passes + 2
        assert run(engine)[-1].finish_reason == "error"
        assert engine.health.failed_rounds == number + 1
    model.breaks_at = None
    assert run(engine)[-1].finish_reason == "length"
    run(engine, max_tokens=1)  # behind the round that settled the first one
    assert engine.health.failed_rounds == 0


def test_a_failed_round_is_none_that_was_completed(engine: Engine, model: Fragile) -> None:
    model.pause_s, model.is_broken = 0.2, True
    chunks: queue.Queue[Chunk] = queue.Queue()
    for name in "abc":
        engine.submit(request(name), chunks.put)
    assert chunks.get(timeout=10).finish_reason == "error"
    time.sleep(0.05)
    assert engine.health.stalled_s > 0.2  # since the first was submitted


def test_a_request_that_cannot_be_opened_loses_none_behind_it(engine: Engine, model: Fragile) -> None:
    chunks: queue.Queue[Chunk] = queue.Queue()
    model.refuses = True
    for name in ("a", "b", "c"):
        engine.submit(request(name, max_tokens=3), chunks.put)
    reasons: dict[str, str | None] = {}
    while len(reasons) < 3:
        chunk = chunks.get(timeout=10)
        if chunk.finish_reason is not None:
            reasons[chunk.request_id] = chunk.finish_reason
    assert set(reasons.values()) == {"error"}
    model.refuses = False
    assert run(engine)[-1].finish_reason == "length"


def test_a_request_id_in_work_and_a_stopped_engine_are_refused(engine: Engine, model: Fragile) -> None:
    model.pause_s = 0.05
    engine.submit(request("a"), lambda _: None)
    with pytest.raises(RequestError, match="in work already"):
        engine.submit(request("a"), lambda _: None)
    engine.stop()
    with pytest.raises(OverloadedError, match="stopping"):
        engine.submit(request("b"), lambda _: None)


def test_a_resumed_request_is_taken_beyond_the_queue(engine: Engine, model: Fragile) -> None:
    model.pause_s = 0.05
    chunks: queue.Queue[Chunk] = queue.Queue()
    for name in ("a", "b", "c"):
        engine.submit(request(name, max_tokens=4), lambda _: None)
    engine.submit(replace(request("d", max_tokens=4), resume_ids=as_ids([7])), chunks.put)
    assert collect(chunks)[-1].finish_reason == "length"


def test_a_role_that_cannot_let_go_loses_no_answer(engine: Engine, model: Fragile) -> None:
    model.holds_on = True
    assert run(engine)[-1].finish_reason == "length"
    model.holds_on = False
    assert run(engine, "b")[-1].finish_reason == "length"


def test_a_request_that_no_row_can_be_opened_for_ends_with_an_error(engine: Engine, model: Fragile) -> None:
    model.refuses = True
    (last,) = run(engine)
    assert last.finish_reason == "error"
    model.refuses = False
    assert run(engine)[-1].finish_reason == "length"


def test_case_35_a_full_queue_refuses_at_once(engine: Engine, model: Fragile) -> None:
    model.pause_s = 0.05
    chunks: queue.Queue[Chunk] = queue.Queue()
    for name in "abc":
        engine.submit(request(name), chunks.put)
    with pytest.raises(OverloadedError):
        engine.submit(request("d"), chunks.put)
    model.pause_s = 0.0
    ended = 0
    while ended < 3:
        ended += chunks.get(timeout=10).finish_reason is not None
    assert len(run(engine, "d")) > 0


def test_two_hundred_cancels_leave_no_orphan(engine: Engine, model: Fragile) -> None:
    for number in range(200):
        name = f"r{number}"
        chunks: queue.Queue[Chunk] = queue.Queue()
        engine.submit(request(name, max_tokens=100), chunks.put)
        if number % 2:
            chunks.get(timeout=10)
        engine.cancel(name)
        last = chunks.get(timeout=10)
        while last.finish_reason is None:
            last = chunks.get(timeout=10)
        assert last.finish_reason == "cancelled"
    assert model.open_sessions == {}
    assert engine.health.num_running == engine.health.num_waiting == 0


def test_health_tells_how_long_no_round_was_completed(engine: Engine, model: Fragile) -> None:
    model.pause_s = 0.5
    engine.submit(request("a", max_tokens=3), lambda _: None)
    time.sleep(0.3)
    assert engine.health.stalled_s > 0.1
    assert engine.health.num_running + engine.health.num_waiting == 1
