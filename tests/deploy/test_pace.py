"""Health by the last completed round, and chunks that leave as soon as their round is over."""

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from serving.decode.engine import Engine, Health
from serving.decode.limits import SchedulerLimits
from serving.decode.stats import EngineStats
from serving.deploy.inlets import Inlets
from serving.deploy.outlets import Outlets
from serving.deploy.target import StalledError, TargetReplica, admitted, raise_if_stalled
from serving.protocols import ScoreRequest
from serving.requests import Chunk
from serving.types import ScoreTable
from tests.decode.scripted import ScriptedModel, arithmetic, make_scheduler, oracle, request

LIMIT_S = 0.3


class Paced(ScriptedModel):
    """Takes `pass_s` for a pass, and waits for `gate` in each."""

    def __init__(self, pass_s: float = 0.0) -> None:
        super().__init__(arithmetic)
        self.pass_s = pass_s
        self.gate = threading.Event()
        self.gate.set()

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreTable | None]:
        self.gate.wait()
        time.sleep(self.pass_s)
        return super().score(requests)


def make_engine(model: Paced, *, max_sessions: int = 4, max_draft: int = 0) -> Engine:
    scheduler = make_scheduler(model, oracle(arithmetic), max_sessions=max_sessions, max_draft=max_draft)
    engine = Engine(scheduler, SchedulerLimits(max_sessions, 256, 600, max_draft))
    engine.start()
    return engine


def test_case_34_a_blocked_loop_is_unhealthy_and_recovers() -> None:
    model, chunks = Paced(), queue.Queue[Chunk]()
    engine = make_engine(model)
    model.gate.clear()
    engine.submit(request("a", max_tokens=5), chunks.put)
    time.sleep(2 * LIMIT_S)
    with pytest.raises(StalledError, match="no round"):
        raise_if_stalled(engine.health, limit_s=LIMIT_S)
    model.gate.set()
    while chunks.get(timeout=5).finish_reason is None:
        pass
    raise_if_stalled(engine.health, limit_s=LIMIT_S)
    engine.stop()


def test_case_34_an_engine_whose_rounds_keep_failing_is_unhealthy() -> None:
    health = Health(stalled_s=0.0, num_running=0, num_waiting=0, degraded=False, failed_rounds=2)
    raise_if_stalled(health, limit_s=LIMIT_S)
    with pytest.raises(StalledError, match="3 rounds in a row have failed"):
        raise_if_stalled(replace(health, failed_rounds=3), limit_s=LIMIT_S)


@pytest.mark.parametrize(
    ("fields", "ready"),
    [({}, True), ({"failed_rounds": 2}, True), ({"failed_rounds": 3}, False), ({"stalled_s": 1.0}, False)],
)
async def test_case_34_what_is_unhealthy_is_not_ready(fields: dict[str, float], ready: bool) -> None:
    health = replace(Health(stalled_s=0.0, num_running=0, num_waiting=0, degraded=False, failed_rounds=0), **fields)
    me = SimpleNamespace(_engine=SimpleNamespace(health=health, stats=EngineStats()), _stall_limit_s=LIMIT_S)
    assert (await TargetReplica.status(me)).ready == ready


def test_case_34_a_burst_of_500_requests_is_healthy() -> None:
    model, chunks = Paced(pass_s=0.001), queue.Queue[Chunk]()
    engine = make_engine(model)
    for number in range(500):
        engine.submit(request(str(number), max_tokens=4), chunks.put)
    ended = 0
    while ended < 500:
        ended += chunks.get(timeout=10).finish_reason is not None
        raise_if_stalled(engine.health, limit_s=LIMIT_S)
    assert engine.health.num_waiting == 0
    engine.stop()


@pytest.mark.parametrize("max_draft", [0, 3])
async def test_case_31_each_round_is_one_flush_that_waits_for_nothing(max_draft: int) -> None:
    model = Paced(pass_s=0.005)
    engine = make_engine(model, max_draft=max_draft)
    rounds_at_arrival, rounds = [], []
    outlets, inlets = Outlets("127.0.0.1"), Inlets()
    with inlets.inbox("a") as inbox, admitted(engine, request("a", max_tokens=24), outlets.outlet(inlets.name)):
        inlets.connect(inbox, outlets.address)
        is_over = False
        while not is_over:
            chunk = await inbox.take()
            rounds_at_arrival.append(model.num_passes)
            rounds.append(chunk.receipt.rounds)
            is_over = chunk.finish_reason is not None
    engine.stop()
    assert rounds == list(range(1, model.num_passes + 1))
    # A chunk arrives while the next pass runs, or before: never after a batch of them.
    late = [seen - number for number, seen in zip(rounds, rounds_at_arrival, strict=True)]
    assert sorted(late)[len(late) // 2] <= 1
