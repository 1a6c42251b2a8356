"""The remote slim verifier: decides as one in place does, and is missed without harm when it hangs, dies or forgets."""

import pickle
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from serving.decode.offline import complete
from serving.deploy.hops import Hops
from serving.deploy.link import Link, WorkerLostError
from serving.deploy.messages import MAX_MESSAGE_BYTES
from serving.deploy.slim_client import RemoteSlim
from serving.deploy.slim_messages import SlimAnswer, SlimCall
from serving.deploy.slim_table import SlimTable
from serving.models.hf_decoder import HFDecoder
from serving.models.slim import slim_in_place
from serving.protocols import ScoreRequest, ScoringModel
from serving.requests import Sampling
from serving.types import Ids, ScoreTable, as_ids
from serving.verifiers.via import ViaVerifier
from tests.deploy.test_messages import modules_in
from tests.models.test_packed_lm import make_lm
from tests.models.tiny import tiny_model
from tests.verifiers.test_via import DEEP, KEPT, LAX, Bench, asked

pytestmark = pytest.mark.usefixtures("one_thread")


class DirectReply:
    def __init__(self, worker: "DirectWorker", answer: SlimAnswer | None) -> None:
        self._worker = worker
        self._answer = answer

    def result(self, timeout_s: float) -> SlimAnswer:
        if self._answer is None or self._worker.is_dead:
            raise WorkerLostError
        if self._worker.hangs:
            raise TimeoutError
        return self._answer


class DirectWorker:
    """A worker in this process; every message goes through pickle."""

    def __init__(self, model: ScoringModel, incarnation: str = "one") -> None:
        self.table = SlimTable(model, incarnation)
        self.messages: list[bytes] = []
        self.hangs = False
        self.is_dead = False

    def send(self, call: SlimCall) -> DirectReply:
        if self.is_dead:
            return DirectReply(self, None)
        self.messages.append(pickle.dumps(call))
        answer = self.table.handle(pickle.loads(self.messages[-1]))
        self.messages.append(pickle.dumps(answer))
        return DirectReply(self, pickle.loads(self.messages[-1]))


def slim_model():
    return slim_in_place(make_lm(HFDecoder(tiny_model("llama", num_hidden_layers=DEEP))), KEPT)


class RemoteBench(Bench):
    """The same three tiers, with the slim verifier behind messages."""

    def __init__(self) -> None:
        super().__init__(LAX)
        self.lost: list[bool] = []
        self.remote = RemoteSlim("me", timeout_s=0.1, on_lost=lambda: self.lost.append(True))
        self.worker = DirectWorker(slim_model())
        self.remote.connect(Link(self.worker, "one"))
        self.scheduler._verifier = ViaVerifier(
            slim=self.remote, full=self.full, gates=LAX, is_degraded=lambda: self.remote.degraded
        )


def test_a_remote_slim_verifier_decides_as_one_in_place_does() -> None:
    local, remote = Bench(LAX), RemoteBench()
    requests = [asked(str(seed), seed=seed) for seed in range(3)]
    expected = [(done.output_ids, done.receipt) for done in local.run(*requests)]
    assert [(done.output_ids, done.receipt) for done in remote.run(*requests)] == expected
    assert remote.worker.table.sessions == []
    assert not remote.remote.degraded


@pytest.mark.parametrize("number", [0, 3, 5])
@pytest.mark.parametrize("harm", ["dies", "hangs", "forgets"])
def test_a_slim_verifier_that_is_lost_in_mid_stream_is_missed_without_harm(harm: str, number: int) -> None:
    bench, rounds = RemoteBench(), 0

    def hurt(_: object) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == number + 1:
            match harm:
                case "dies":
                    bench.worker.is_dead = True
                case "hangs":
                    bench.worker.hangs = True
                case _:
                    bench.remote.connect(Link(DirectWorker(slim_model(), "two"), "two"))

    (done,) = complete(bench.scheduler, [asked()], on_chunk=hurt)
    assert len(done.output_ids) == 40
    assert done.receipt.degraded == (harm != "forgets")
    assert bench.lost == ([True] if harm == "dies" else [])
    slim = done.receipt.slim
    assert slim is None or slim.audited + slim.unseen == slim.accepted + slim.regenerated


def test_one_that_answers_again_is_used_again() -> None:
    bench = RemoteBench()
    bench.worker.hangs = True
    (first,) = bench.run(asked("first"))
    bench.worker.hangs = False
    (second,) = bench.run(asked("second"))
    assert (first.receipt.degraded, second.receipt.degraded) == (True, False)
    assert second.receipt.slim is not None
    assert bench.worker.table.sessions == []


class Canned:
    """Scores any text with columns of its length, and has `num_rows` rows."""

    def __init__(self, num_rows: int = 64) -> None:
        self.free = num_rows

    def open(self, session_id: str, ids: Ids, *, salt: str = "") -> int:
        if not self.free:
            raise KeyError(session_id)
        self.free -= 1
        return 0

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreTable | None]:
        return [_canned(request) for request in requests]

    def close(self, session_id: str) -> None:
        self.free += 1


class Noting(Canned):
    """Keeps every text that it is asked to score."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreTable | None]:
        self.seen += [request.ids.tolist() for request in requests]
        return super().score(requests)


def _canned(request: ScoreRequest) -> ScoreTable:
    ones = np.ones(request.num_rows, dtype=np.float32)
    ids = as_ids(list(range(request.num_rows)))
    return ScoreTable(request.draft_ids, ids, ones, ones[:-1], ids, ones, logsumexp=ones)


@pytest.mark.parametrize(("batch", "length"), [(1, 10), (16, 2048), (64, 500), (4, 50_000)])
def test_messages_are_small_and_have_neither_tensor_nor_array(batch: int, length: int) -> None:
    worker = DirectWorker(Canned())
    remote = RemoteSlim("a" * 8, timeout_s=1.0, on_lost=lambda: None)
    remote.connect(Link(worker, "one"))
    names = [f"chatcmpl-{i:032x}" for i in range(batch)]
    sampling = Sampling(logit_bias=tuple((i, 1.0) for i in range(10)))
    ids = np.arange(length + 17, dtype=np.int32)
    for name in names:
        remote.open(name, ids[:length])
    for stop in (length, length + 17):
        requests = [ScoreRequest(name, ids[:stop], 8, sampling, prompt_len=5) for name in names]
        tables = remote.score(requests)
        assert all(table is not None and len(table.next_ids) == 8 for table in tables)
        assert all(np.array_equal(table.draft_ids, ids[stop - 7 : stop]) for table in tables if table is not None)
    for message in worker.messages:
        assert len(message) < MAX_MESSAGE_BYTES
        assert not {"torch", "transformers", "numpy"} & modules_in(pickle.loads(message))


class LateReply:
    """Answers at once, but takes its time to be read."""

    def __init__(self, reply: DirectReply) -> None:
        self._reply = reply

    def result(self, timeout_s: float) -> SlimAnswer:
        time.sleep(0.02)
        return self._reply.result(timeout_s)


class FarWorker(DirectWorker):
    def send(self, call: SlimCall) -> LateReply:  # type: ignore[override]
        return LateReply(super().send(call))


def test_a_remote_slim_verifier_keeps_count_of_its_hops() -> None:
    remote, worker = RemoteSlim("me", timeout_s=1.0, on_lost=lambda: None), FarWorker(Canned())
    request = ScoreRequest("a", as_ids([1, 2, 3]))
    remote.open("a", request.ids)
    assert remote.score([request]) == [None]  # nobody to call
    assert remote.hops == Hops()
    remote.connect(Link(worker, "one"))
    remote.score([request])
    assert remote.hops.num_calls == 1
    assert remote.hops.hop_s >= 0.02
    assert 0.0 < remote.hops.compute_s < remote.hops.call_s
    worker.hangs = True
    assert remote.score([request]) == [None]
    assert remote.hops.num_calls == 1  # no answer, no time


def test_without_a_row_a_session_has_no_scores_and_the_others_do() -> None:
    worker = DirectWorker(Canned(num_rows=1))
    remote = RemoteSlim("me", timeout_s=1.0, on_lost=lambda: None)
    remote.connect(Link(worker, "one"))
    requests = [ScoreRequest(name, as_ids([1, 2, 3])) for name in "ab"]
    for request in requests:
        remote.open(request.session_id, request.ids)
    found = remote.score(requests)
    assert [table is not None for table in found] == [True, False]
    remote.close("a")
    assert [table is not None for table in remote.score(requests[1:])] == [True]
    assert worker.table.release("me") == 1


def test_another_request_by_the_same_name_starts_from_nothing() -> None:
    worker = DirectWorker(Canned())
    remote = RemoteSlim("me", timeout_s=1.0, on_lost=lambda: None)
    remote.connect(Link(worker, "one"))
    request = ScoreRequest("a", as_ids([1, 2, 3]))
    remote.open("a", request.ids)
    remote.score([request])
    remote.close("a")
    remote.open("a", request.ids, salt="another tenant's")
    remote.score([replace(request, ids=as_ids([7]))])
    (entry,) = worker.table._entries.values()
    assert (entry.ids.tolist(), entry.opening.salt) == ([7], "another tenant's")


def test_after_a_timeout_the_next_call_begins_where_both_surely_agree() -> None:
    model = Noting()
    worker = DirectWorker(model)
    remote = RemoteSlim("me", timeout_s=1.0, on_lost=lambda: None)
    remote.connect(Link(worker, "one"))
    remote.open("a", as_ids([1, 2, 3]))
    remote.score([ScoreRequest("a", as_ids([1, 2, 3, 5, 6]))])
    worker.hangs = True
    assert remote.score([ScoreRequest("a", as_ids([1, 2, 3, 7, 8]))]) == [None]
    worker.hangs = False
    remote.score([ScoreRequest("a", as_ids([1, 2, 3, 5, 6, 9]))])
    assert model.seen == [[1, 2, 3, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 5, 6, 9]]


def test_what_is_rolled_back_travels_again() -> None:
    worker = DirectWorker(Canned())
    remote = RemoteSlim("me", timeout_s=1.0, on_lost=lambda: None)
    remote.connect(Link(worker, "one"))
    remote.open("a", as_ids([1, 2, 3]))
    remote.score([ScoreRequest("a", as_ids([1, 2, 3]))])
    remote.rollback("a", 2)
    remote.score([ScoreRequest("a", as_ids([1, 2, 3, 4]))])
    assert pickle.loads(worker.messages[-2]).items[0].base_len == 2
