"""Roles that die, hang or are left: the text stays the same, they come back, and nothing is left over."""

import asyncio
import json
import signal
import socket
from contextlib import ExitStack

import httpx
import pytest

from serving.deploy.lease import LEASE_S
from tests.cluster.application import Story, plainly, request, run_app
from tests.cluster.conftest import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]

LONG = 1200


@pytest.fixture(scope="module")
def expected(model_profile):
    """The plain answer to the one long request of this module."""
    return plainly(model_profile, request("plain", LONG))["plain"]


@pytest.fixture(scope="module")
def application(local_ray, model_profile):
    application = run_app(model_profile)
    wait_for(application.is_whole, what="the first lease")
    return application


@pytest.fixture(autouse=True)
def _starts_whole(application):
    wait_for(application.is_whole, timeout_s=120, what="recovery")


def tell(application, name, *, then=lambda: None):
    """Stream the long request; do something at its tenth chunk."""

    async def consume():
        chunks = []
        async for chunk in application.client.generate(request(name, LONG)):
            chunks.append(chunk)
            if len(chunks) == 10:
                then()
        return Story.of(chunks)

    return asyncio.run(consume())


def test_an_undisturbed_stream_is_speculative_and_plain_in_its_ids(application, expected):
    story = tell(application, "undisturbed")
    assert story.result == expected
    receipt = story.last.receipt
    assert (receipt.degraded, receipt.resumed, receipt.emitted) == (False, 0, len(story.ids))
    assert receipt.accepted > len(story.ids) // 2


def test_case_33_kill_the_drafter_in_mid_stream(application, expected, processes):
    story = tell(application, "drafter dies", then=lambda: processes.signal("ray::DrafterWorker", signal.SIGKILL))
    assert story.result == expected
    assert story.last.receipt.degraded
    wait_for(application.is_whole, what="another drafter")
    again = tell(application, "after the death")
    assert again.result == expected
    assert (again.last.receipt.degraded, again.last.receipt.accepted > len(again.ids) // 2) == (False, True)


def test_kill_the_replica_that_owns_the_drafter(application, expected, processes):
    story = tell(
        application,
        "owner dies",
        then=lambda: processes.signal("ray::ServeReplica:drafthouse:Drafter", signal.SIGKILL),
    )
    assert (story.result, story.last.receipt.degraded) == (expected, True)
    wait_for(application.is_whole, what="another replica")
    assert len(processes.pids("ray::DrafterWorker")) == 1


def test_case_33_a_drafter_that_hangs_and_comes_back(application, expected, processes):
    pids = []
    story = tell(
        application,
        "drafter hangs",
        then=lambda: pids.append(processes.signal("ray::DrafterWorker", signal.SIGSTOP)),
    )
    try:
        assert story.result == expected
        assert story.last.receipt.degraded
        assert application.status().degraded
    finally:
        processes.signal("ray::DrafterWorker", signal.SIGCONT)
    wait_for(application.is_whole, timeout_s=20, what="recovery")
    assert processes.pids("ray::DrafterWorker") == pids
    wait_for(lambda: application.drafter_sessions() == [], timeout_s=10, what="no session left")
    again = tell(application, "after the hang")
    assert (again.result, again.last.receipt.degraded) == (expected, False)


def test_case_32_five_hundred_cancels_leave_no_orphans(application):
    application.begin_and_leave(500, LONG)
    wait_for(application.is_empty, timeout_s=5, what="an empty target")
    wait_for(lambda: application.drafter_sessions() == [], timeout_s=5, what="an empty drafter")
    assert application.status().stats["cancelled"] >= 375


def streamed(port):
    """The events of the long request over HTTP."""
    body = {"model": "tiny", "prompt": "a b c a b c", "max_tokens": LONG, "stream": True}
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def text_of(events):
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_case_32_http_clients_that_leave_free_their_places(application, local_ray):
    for _ in range(10):
        events = streamed(local_ray)
        next(events)
        events.close()
    wait_for(lambda: application.status().running == 0, timeout_s=5, what="an empty target")
    wait_for(lambda: application.drafter_sessions() == [], timeout_s=5, what="an empty drafter")


def begun(port):
    """A connection on which the longest request was made that there is, not as a stream."""
    body = json.dumps({"model": "tiny", "prompt": "a b c a b c", "max_tokens": 2000, "ignore_eos": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(head.encode() + body)
    return connection


def test_case_32_http_clients_that_leave_before_a_whole_answer_free_their_places(application, local_ray):
    num_cancelled = application.status().stats["cancelled"]
    with ExitStack() as connections:
        for _ in range(4):
            connections.enter_context(begun(local_ray))
        wait_for(lambda: application.status().running == 4, timeout_s=20, what="four requests in work")
    wait_for(application.is_empty, timeout_s=5, what="an empty target")
    wait_for(lambda: application.drafter_sessions() == [], timeout_s=5, what="an empty drafter")
    assert application.status().stats["cancelled"] == num_cancelled + 4


def test_kill_the_target_in_mid_stream(application, local_ray, processes):
    undisturbed = list(streamed(local_ray))
    events = []
    for event in streamed(local_ray):
        events.append(event)
        if len(events) == 10:
            processes.signal("ray::ServeReplica:drafthouse:Target", signal.SIGKILL)
    assert text_of(events) == text_of(undisturbed)
    before, after = undisturbed[-1]["speculation"], events[-1]["speculation"]
    assert (before["resumed"], after["resumed"]) == (0, 1)
    assert (before["emitted"], before["lossless"]) == (after["emitted"], after["lossless"])
    wait_for(lambda: application.drafter_sessions() == [], timeout_s=LEASE_S + 5, what="an end of its lease")
