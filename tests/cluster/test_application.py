"""Two applications on one Ray: separate and colocated roles, and what a full queue says."""

import asyncio
import signal

import httpx
import pytest

from cluster.resources import PlacementError
from jobs.deploying import deployed, readiness
from serving.app import AppArgs
from serving.deploy.options import Scaling
from serving.errors import RequestError
from tests.cluster.application import Story, plainly, request, run_app
from tests.cluster.conftest import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]

QUEUE_LIMIT = 4
SILENCE_LIMIT_S = 4.0
PLACES = 2
PROMPTS = [[1, 30, 40, 50] * 3, [7, 8, 9] * 20, list(range(100, 160)), [5]]


@pytest.fixture(scope="module")
def expected(model_profile):
    requests = [request(str(i), 100 + 50 * i, prompt=ids) for i, ids in enumerate(PROMPTS)]
    return plainly(model_profile, *requests)


@pytest.fixture(scope="module")
def separate(local_ray, model_profile):
    application = run_app(model_profile, stall_limit_s=SILENCE_LIMIT_S)
    wait_for(application.is_whole, what="the first lease")
    return application


@pytest.fixture(scope="module")
def colocated(local_ray, profile_file, tiny_model):
    engine = {"max_sessions": PLACES, "max_queued": QUEUE_LIMIT, "max_length": 2048, "guard": False}
    drafter = {"kind": "model", "model": tiny_model, "max_draft": 4}
    path = profile_file("together", drafter, placement="colocated", engine=engine)
    return run_app(path, name="colocated")


def answers(application):
    """All prompts at once, by the handle."""

    async def one(number, prompt):
        asked = request(f"{number}", 100 + 50 * number, prompt=prompt)
        return Story.of([chunk async for chunk in application.client.generate(asked)])

    async def together():
        return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(PROMPTS)))

    return {story.last.request_id: story for story in asyncio.run(together())}


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_either_placement_gives_the_plain_answer_and_speculates(placement, expected, request):
    stories = answers(request.getfixturevalue(placement))
    assert {name: story.result for name, story in stories.items()} == expected
    receipts = {name: story.last.receipt for name, story in stories.items()}
    assert all(receipt.accepted > 0 and not receipt.degraded for receipt in receipts.values()), receipts


def test_a_request_that_cannot_be_served_comes_back_as_itself(separate):
    async def ask():
        async for _ in separate.client.generate(request("too long", 5000)):
            raise AssertionError("a stream began")

    with pytest.raises(RequestError) as caught:
        asyncio.run(ask())
    assert type(caught.value) is RequestError
    assert caught.value.field == "max_tokens"


def test_readiness_over_http(separate, colocated, local_ray):
    assert readiness(f"http://127.0.0.1:{local_ray}") == "ready"
    assert readiness(f"http://127.0.0.1:{local_ray}/colocated") == "ready"


def test_case_35_a_full_queue_answers_429_and_no_place_is_wasted(colocated, local_ray):
    body = {"model": "together", "prompt": "a b c", "max_tokens": 1500, "stream": True}
    url = f"http://127.0.0.1:{local_ray}/colocated/v1/completions"

    async def together():
        async with httpx.AsyncClient(timeout=120) as client:
            return await asyncio.gather(*(client.post(url, json=body) for _ in range(20)))

    responses = asyncio.run(together())
    served = [r for r in responses if r.status_code == 200]
    refused = [r for r in responses if r.status_code == 429]
    assert len(served) + len(refused) == 20
    assert len(served) >= PLACES + QUEUE_LIMIT
    assert refused
    assert all(int(r.headers["retry-after"]) > 0 and "data:" not in r.text for r in refused)


def test_case_33_a_drafter_that_stays_silent_is_ended_and_replaced(separate, processes):
    silent = processes.signal("ray::DrafterWorker", signal.SIGSTOP)
    stories = answers(separate)
    assert all(story.last.receipt.degraded for story in stories.values())
    wait_for(separate.is_whole, what="another drafter")
    wait_for(lambda: silent not in processes.pids("ray::DrafterWorker"), what="the end of the silent one")
    assert not any(story.last.receipt.degraded for story in answers(separate).values())


def test_case_36_more_than_there_is_places_nothing(local_ray, model_profile):
    args = AppArgs(profile=model_profile, target=Scaling(num_cpus=64), drafter=Scaling(num_gpus=1))
    with (
        pytest.raises(PlacementError, match=r"no room for drafter x1, target x1; nothing was placed\n"),
        deployed(args),
    ):
        raise AssertionError("it was placed")
