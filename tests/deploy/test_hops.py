"""The hop is what a call costs beyond the drafter's own time, where the call was waited for."""

import time

import pytest

from serving.deploy.clients import RemoteDrafter
from serving.deploy.hops import Hops
from serving.deploy.link import Link
from serving.protocols import DraftRequest
from serving.types import as_ids
from tests.deploy.fakes import DirectWorker


@pytest.mark.parametrize(
    ("asked_s", "answered_s", "compute_s", "expected"),
    [
        (0.0, 10.0, 7.0, Hops(1, 10.0, 7.0)),
        (4.0, 10.0, 7.0, Hops(1, 10.0, 7.0)),
        (6.0, 10.0, 7.0, Hops()),  # the target did other work for longer than it waited
        (0.0, 1.0, 2.0, Hops(1, 1.0, 1.0)),  # no negative hop, whatever the drafter says
    ],
)
def test_one_call(asked_s, answered_s, compute_s, expected):
    hops = Hops().plus(sent_s=0.0, asked_s=asked_s, answered_s=answered_s, compute_s=compute_s)
    assert hops == expected
    assert hops.hop_s == expected.call_s - expected.compute_s >= 0.0


def test_sums_grow():
    one = {"sent_s": 0.0, "asked_s": 0.0, "answered_s": 3.0, "compute_s": 1.0}
    assert Hops().plus(**one).plus(**one) == Hops(2, 6.0, 2.0)


class LateReply:
    """Answers at once, but takes its time to be read."""

    def __init__(self, reply):
        self._reply = reply

    def result(self, timeout_s):
        time.sleep(0.02)
        return self._reply.result(timeout_s)


class FarWorker(DirectWorker):
    def send(self, call):
        return LateReply(super().send(call))


def test_a_remote_drafter_keeps_count_of_its_hops():
    drafter = RemoteDrafter("me", timeout_s=1.0, on_lost=lambda: None)
    drafter.connect(Link(FarWorker(), "one"))
    drafter.start([DraftRequest("s", as_ids([1, 2]), prompt_len=1, max_draft=1)]).result()
    assert drafter.hops.num_calls == 1
    assert drafter.hops.hop_s >= 0.02
    assert 0.0 < drafter.hops.compute_s < drafter.hops.call_s
