"""VIA-SD with the slim verifier on an actor of its own: same text as in one process, and a death changes little."""

import asyncio
import json
import signal

import pytest
from ray import serve

from serving.build import build
from serving.config import load_profile
from serving.decode.offline import complete
from serving.deploy.options import Scaling
from tests.cluster.application import Story, plainly, request, run_app
from tests.cluster.conftest import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]

LONG = 400


@pytest.fixture(scope="module")
def mask(tiny_model, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("mask") / "mask.json"
    path.write_text(json.dumps({"model": tiny_model, "num_layers": 2, "kept": [1]}))
    return str(path)


@pytest.fixture(scope="module")
def via_profile(profile_file, tiny_model, mask):
    """Writes a profile whose slim verifier lacks one of two layers."""

    def write(name: str, **gates: object) -> str:
        drafter = {"kind": "model", "model": tiny_model, "max_draft": 4}
        verifier = {"kind": "via", "mask": mask, "min_confidence": 0.0} | gates
        return profile_file(name, drafter, verifier=verifier, allow_uncertified=True)

    return write


@pytest.fixture(scope="module")
def lax(via_profile) -> str:
    return via_profile("lax", theta_accept=0.05, theta_escalate=0.01)


@pytest.fixture(scope="module")
def application(local_ray, lax):
    third = Scaling(num_cpus=0.5)
    application = run_app(lax, target=third, drafter=third, slim=third)
    wait_for(application.is_whole, what="the first leases")
    return application


def slim_sessions(application) -> list[tuple[str, str]]:
    return serve.get_deployment_handle("SlimVerifier", application.name).sessions.remote().result(timeout_s=30)


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


def test_the_actor_decides_as_in_one_process(application, lax):
    (expected,) = complete(build(load_profile(lax)).scheduler, [request("local", LONG)])
    story = tell(application, "separate")
    assert story.result == (expected.output_ids, expected.text, expected.finish_reason)
    receipt = story.last.receipt
    assert (receipt.lossless, receipt.degraded) == (False, False)
    assert receipt.slim == expected.receipt.slim
    assert receipt.slim.accepted > 0
    wait_for(lambda: slim_sessions(application) == [], timeout_s=10, what="no session left")


def test_case_32_cancels_leave_nothing_at_the_slim_verifier(application):
    before = application.status().stats
    application.begin_and_leave(100, LONG)
    wait_for(application.is_empty, timeout_s=5, what="an empty target")
    wait_for(lambda: slim_sessions(application) == [], timeout_s=5, what="an empty slim verifier")
    wait_for(lambda: application.drafter_sessions() == [], timeout_s=5, what="an empty drafter")
    after = application.status().stats
    assert after["cancelled"] - before["cancelled"] >= 75
    assert after["slim_passes"] > before["slim_passes"]


def test_kill_the_slim_verifier_in_mid_stream(application, processes):
    story = tell(application, "slim dies", then=lambda: processes.signal("ray::SlimWorker", signal.SIGKILL))
    receipt = story.last.receipt
    assert (len(story.ids), story.last.finish_reason, receipt.degraded) == (LONG, "length", True)
    assert receipt.slim.audited + receipt.slim.unseen == receipt.slim.accepted + receipt.slim.regenerated
    wait_for(application.is_whole, what="another slim verifier")
    again = tell(application, "after the death")
    assert not again.last.receipt.degraded
    assert again.last.receipt.slim.accepted > 0


def test_always_escalating_through_the_actor_is_plain(application, via_profile):
    strict = via_profile("always", theta_accept=1.5, theta_escalate=1.5)
    third = Scaling(num_cpus=0.1)
    other = run_app(strict, name="always", target=third, drafter=third, slim=third)
    wait_for(other.is_whole, what="the leases")
    story = tell(other, "escalated")
    assert story.result == plainly(strict, request("plain", LONG))["plain"]
    assert story.last.receipt.lossless
    assert story.last.receipt.slim.passes > 0
    serve.delete("always")
