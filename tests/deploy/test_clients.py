"""The remote drafter against a worker that hangs, dies, or comes back."""

import time

import pytest

from serving.decode.offline import complete
from serving.deploy.clients import RemoteDrafter
from serving.deploy.link import Link, WorkerFailedError
from serving.deploy.table import DraftTable
from serving.drafters.model import ModelDrafter
from serving.protocols import DraftRequest
from serving.types import as_ids
from tests.decode.scripted import ScriptedModel, arithmetic, make_scheduler
from tests.decode.scripted import request as generation
from tests.deploy.fakes import DirectWorker


class FailingWorker:
    class Failed:
        def result(self, timeout_s):
            raise WorkerFailedError("boom")

    def send(self, call):
        return self.Failed()


def request(session_id="s", ids=(1, 2, 3)):
    return DraftRequest(session_id, as_ids(ids), prompt_len=1, max_draft=1)


@pytest.fixture
def lost():
    return []


@pytest.fixture
def drafter(lost):
    return RemoteDrafter("me", timeout_s=0.1, on_lost=lambda: lost.append(True))


def draft(drafter, *ids):
    return [d.ids.tolist() for d in drafter.start([request(ids=ids)]).result()]


def test_without_a_lease_nothing_is_drafted_and_it_says_so(drafter):
    assert drafter.degraded
    assert draft(drafter, 1, 2) == [[]]
    drafter.close("s", None)


def test_with_a_lease_it_drafts(drafter):
    worker = DirectWorker()
    drafter.connect(Link(worker, "one"))
    assert not drafter.degraded
    assert draft(drafter, 1, 2) == [[3]]


def test_the_passes_of_a_draft_model_are_counted_wherever_it_is(drafter):
    worker = DirectWorker()
    model = ScriptedModel(arithmetic, feed_passes=2)
    worker.table = DraftTable(ModelDrafter(model, max_length=100), "one")
    drafter.connect(Link(worker, "one"))
    receipts = [
        next(complete(make_scheduler(ScriptedModel(arithmetic), one, max_draft=3), [generation("a")])).receipt
        for one in (drafter, ModelDrafter(ScriptedModel(arithmetic, feed_passes=2), max_length=100))
    ]
    assert receipts[0] == receipts[1]
    assert receipts[0].draft_passes == receipts[0].drafted == model.num_passes - 2 > 0


def test_case_33_a_worker_that_hangs_is_left_alone_until_it_has_answered(drafter, lost):
    worker = DirectWorker()
    drafter.connect(Link(worker, "one"))
    worker.hangs = True
    pending = drafter.start([request(ids=(1, 2))])
    assert not drafter.degraded
    assert [len(d) for d in pending.result()] == [0]
    assert drafter.degraded
    assert draft(drafter, 1, 2, 3) == [[]]
    assert len(worker.calls) == 1
    worker.hangs = False
    assert not drafter.degraded
    assert draft(drafter, 1, 2, 3, 4) == [[5]]
    assert worker.drafter.seen == {"me/s": [1, 2, 3, 4]}
    assert lost == []


def test_a_worker_that_dies_while_it_hangs_is_lost(drafter, lost):
    worker = DirectWorker()
    drafter.connect(Link(worker, "one"))
    worker.hangs = True
    draft(drafter, 1, 2)
    worker.is_dead = True
    assert (drafter.degraded, lost) == (True, [True])


def test_a_renewed_lease_on_a_worker_that_hangs_changes_nothing(drafter):
    worker = DirectWorker()
    drafter.connect(Link(worker, "one"))
    worker.hangs = True
    draft(drafter, 1, 2)
    drafter.connect(Link(worker, "one"))
    assert drafter.degraded
    drafter.connect(Link(DirectWorker("two"), "two"))
    assert not drafter.degraded


def test_case_33_a_worker_that_dies_is_replaced_and_told_everything_anew(drafter, lost):
    worker = DirectWorker()
    drafter.connect(Link(worker, "one"))
    draft(drafter, 1, 2)
    worker.is_dead = True
    assert draft(drafter, 1, 2, 3) == [[]]
    assert (drafter.degraded, lost) == (True, [True])
    drafter.close("gone meanwhile", None)
    fresh = DirectWorker("two")
    drafter.connect(Link(fresh, "two"))
    assert not drafter.degraded
    assert draft(drafter, 1, 2, 3, 4) == [[5]]
    assert fresh.drafter.seen == {"me/s": [1, 2, 3, 4]}


def test_the_silence_of_a_worker_that_was_already_replaced_is_no_news(drafter):
    old = DirectWorker()
    drafter.connect(Link(old, "one"))
    old.hangs = True
    pending = drafter.start([request()])
    drafter.connect(Link(DirectWorker("two"), "two"))
    assert [len(d) for d in pending.result()] == [0]
    assert not drafter.degraded


def test_the_death_of_a_worker_that_was_already_replaced_is_no_news(drafter, lost):
    old = DirectWorker()
    drafter.connect(Link(old, "one"))
    old.is_dead = True
    pending = drafter.start([request()])
    drafter.connect(Link(DirectWorker("two"), "two"))
    assert [len(d) for d in pending.result()] == [0]
    assert (drafter.degraded, lost) == (False, [])


def test_a_worker_that_fails_rests_a_moment(drafter, lost):
    drafter.connect(Link(FailingWorker(), "one"))
    assert draft(drafter, 1, 2) == [[]]
    assert drafter.degraded
    time.sleep(1.05)
    assert not drafter.degraded
    assert lost == []


def test_the_last_close_is_sent_at_once_and_an_earlier_one_waits_for_the_next_round(drafter):
    worker = DirectWorker()
    drafter.connect(Link(worker, "one"))
    drafter.start([request("a"), request("b")]).result()
    drafter.close("a", None)
    assert worker.drafter.closed == []
    drafter.close("b", as_ids([1, 2, 3, 4]))
    assert worker.drafter.closed == [("me/a", None), ("me/b", [1, 2, 3, 4])]
    assert worker.table.sessions == []


def test_closes_during_a_hang_are_sent_when_it_is_over(drafter):
    worker = DirectWorker()
    drafter.connect(Link(worker, "one"))
    worker.hangs = True
    draft(drafter, 1, 2)
    drafter.close("s", None)
    assert worker.table.sessions == [("me", "s")]
    worker.hangs = False
    drafter.tidy()
    assert worker.table.sessions == []
