"""/health, /ready, /v1/models and the API's own description."""

import pytest

from serving.config import Profile
from serving.deploy.status import TargetStatus
from tests.api.scripted import ScriptedBackend, http_client, openai_client


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (TargetStatus(True, False, 3, 2, {}), 200, {"status": "ready", "running": 3, "waiting": 2}),
        (TargetStatus(True, True, 1, 0, {}), 200, {"status": "degraded", "running": 1, "waiting": 0}),
        (TargetStatus(False, False, 0, 0, {}), 503, {"status": "loading", "running": 0, "waiting": 0}),
        (ConnectionError("no target"), 503, {"status": "unreachable"}),
    ],
)
async def test_ready_says_what_the_target_says(status, code, expected):
    async with http_client(ScriptedBackend(target_status=status)) as client:
        ready, health = await client.get("/ready"), await client.get("/health")
    assert (ready.status_code, ready.json()) == (code, expected)
    assert (health.status_code, health.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_take_head_too(path):
    async with http_client(ScriptedBackend()) as client:
        assert (await client.head(path)).status_code == 200
        refused, described = await client.post(path), (await client.get("/openapi.json")).json()
    assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_allowed")
    assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD"}
    assert set(described["paths"][path]) == {"get"}


async def test_a_405_says_what_is_allowed():
    async with http_client(ScriptedBackend()) as client:
        assert (await client.get("/v1/completions")).headers["allow"] == "POST"


async def test_models_are_the_target_s_name_and_the_profile_s():
    client = openai_client(ScriptedBackend())
    listed = await client.models.list()
    assert [model.id for model in listed.data] == ["tiny-chat", "tiny-suffix"]
    assert (await client.models.retrieve("tiny-suffix")).owned_by == "drafthouse"


async def test_a_profile_named_like_its_model_is_listed_once():
    client = openai_client(ScriptedBackend(profile=Profile(name="tiny-chat")))
    assert [model.id for model in (await client.models.list()).data] == ["tiny-chat"]


@pytest.mark.parametrize("name", ["tiny-chat", "tiny-suffix"])
async def test_both_names_are_answered_and_given_back(name):
    answer = await openai_client(ScriptedBackend()).completions.create(model=name, prompt="hi")
    assert answer.model == name


@pytest.mark.parametrize("path", ["/v1/models/nope", "/v1/models/%F0%9F%98%80"])
async def test_an_unknown_model_is_a_404(path):
    async with http_client(ScriptedBackend()) as client:
        response = await client.get(path)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_the_api_describes_itself():
    async with http_client(ScriptedBackend()) as client:
        schema = (await client.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready"} <= set(schema["paths"])
    assert "speculation" in schema["components"]["schemas"]["ChatBody"]["properties"]
