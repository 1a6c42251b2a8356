"""What goes wrong behind the API: as a status before a stream begins, as an error event after."""

import json

import openai
import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from serving.errors import ModelError, OverloadedError, RequestError
from tests.api.scripted import ScriptedBackend, chat_body, chunk, http_client, openai_client, text_body

SECRET = "the-secret-prompt"


def from_ray(error):
    """`error` as it arrives from another actor, with the remote traceback as its text."""
    return RayTaskError("generate", f"Traceback: {SECRET}", error).as_instanceof_cause()


FAILURES = [
    (OverloadedError(SECRET), 429, "rate_limit_error", "overloaded"),
    (from_ray(OverloadedError(SECRET)), 429, "rate_limit_error", "overloaded"),
    (BackPressureError(5, 4), 429, "rate_limit_error", "overloaded"),
    (from_ray(BackPressureError(5, 4)), 429, "rate_limit_error", "overloaded"),
    (ActorDiedError(), 503, "server_error", "unavailable"),
    (WorkerCrashedError(), 503, "server_error", "unavailable"),
    (NodeDiedError(SECRET), 503, "server_error", "unavailable"),
    (DeploymentUnavailableError("Target"), 503, "server_error", "unavailable"),
    (chunk("", finish_reason="cancelled"), 503, "server_error", "cancelled"),
    (RequestError("prompt", "must be shorter"), 400, "invalid_request_error", "invalid_value"),
    (from_ray(RequestError("prompt", "must be shorter")), 400, "invalid_request_error", "invalid_value"),
    (RuntimeError(SECRET), 500, "server_error", "internal_error"),
    (from_ray(RuntimeError(SECRET)), 500, "server_error", "internal_error"),
    (ModelError(SECRET), 500, "server_error", "internal_error"),
    (chunk("", finish_reason="error", error=SECRET), 500, "server_error", "internal_error"),
    (chunk("no end", 1), 500, "server_error", "internal_error"),
]
# A script that merely stops looks well until its end: as a stream it has begun by then.
AT_ONCE = [failure for failure in FAILURES if getattr(failure[0], "text", "") != "no end"]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    ("stream", "step", "status", "kind", "code"),
    [(False, *failure) for failure in FAILURES] + [(True, *failure) for failure in AT_ONCE],
)
async def test_a_failure_before_the_answer_is_a_status_case_35(route, stream, step, status, kind, code, caplog):
    backend = ScriptedBackend([step])
    body = chat_body if route.startswith("chat") else text_body
    async with http_client(backend) as client:
        response = await client.post(f"/v1/{route}", json=body(stream=stream))
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (status, kind, code)
    assert (response.headers.get("retry-after") is not None) == (status in (429, 503))
    assert SECRET not in response.text + caplog.text
    assert backend.num_open == 0


async def test_the_engine_s_refusal_keeps_its_field_and_sentence():
    backend = ScriptedBackend([from_ray(RequestError("prompt", "must be shorter"))])
    with pytest.raises(openai.BadRequestError) as caught:
        await openai_client(backend).chat.completions.create(**chat_body())
    assert caught.value.body["message"] == "prompt: must be shorter"
    assert caught.value.param == "prompt"


async def test_overload_is_the_official_client_s_rate_limit_error():
    backend = ScriptedBackend([OverloadedError("full")])
    with pytest.raises(openai.RateLimitError) as caught:
        await openai_client(backend).chat.completions.create(**chat_body(stream=True))
    assert caught.value.response.headers["retry-after"] == "2"


async def test_a_500_names_the_request_id_and_logs_the_place_but_not_the_message(caplog):
    async with http_client(ScriptedBackend([RuntimeError(SECRET)])) as client:
        headers = {"x-request-id": "abc-1"}
        response = await client.post("/v1/completions", json=text_body(), headers=headers)
    assert "report request id abc-1" in response.json()["error"]["message"]
    assert "request_id=abc-1 failed with RuntimeError" in caplog.text
    assert "scripted.py" in caplog.text


MID_STREAM = [
    (RuntimeError(SECRET), "internal_error"),
    (ActorDiedError(), "unavailable"),
    (chunk("", finish_reason="error", error=SECRET), "internal_error"),
    (chunk("", finish_reason="cancelled"), "cancelled"),
]


@pytest.mark.parametrize(("step", "code"), MID_STREAM)
async def test_a_failure_after_streaming_began_is_one_error_event_and_the_end(step, code, caplog):
    caplog.set_level("INFO", logger="serving")
    backend = ScriptedBackend([chunk("Hel", 1), step])
    async with http_client(backend) as client:
        response = await client.post("/v1/completions", json=text_body(stream=True))
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert response.status_code == 200
    assert json.loads(events[0])["choices"][0]["text"] == "Hel"
    assert json.loads(events[1])["error"]["code"] == code
    assert len(events) == 2
    assert SECRET not in response.text + caplog.text
    assert "status=200 outcome=failed" in caplog.text
    assert backend.num_open == 0


@pytest.mark.parametrize("script", [[chunk("Hel", 1)], [chunk("Hel", 1), RuntimeError("boom")]])
async def test_the_official_client_raises_on_a_stream_that_fails(script):
    stream = await openai_client(ScriptedBackend(script)).chat.completions.create(**chat_body(stream=True))
    with pytest.raises(openai.APIError, match="The server failed on this request"):
        _ = [event async for event in stream]


async def test_nothing_after_the_finish_reason_is_delivered_and_the_source_is_closed():
    backend = ScriptedBackend([chunk("a", 1, finish_reason="stop"), chunk("b", 2)])
    answer = await openai_client(backend).chat.completions.create(**chat_body())
    assert (answer.choices[0].message.content, answer.usage.completion_tokens) == ("a", 1)
    assert backend.num_open == 0


async def test_an_unknown_model_is_a_404_that_lists_those_there_are():
    with pytest.raises(openai.NotFoundError) as caught:
        await openai_client(ScriptedBackend()).chat.completions.create(**chat_body() | {"model": "gpt-4o"})
    assert caught.value.code == "model_not_found"
    assert "model: 'gpt-4o' is not served here; use 'tiny-chat' or 'tiny-suffix'" in caught.value.message


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/embeddings", 404, "unknown_route"),
        ("GET", "/", 404, "unknown_route"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
    ],
)
async def test_an_unknown_route_has_an_error_body_too(method, path, status, code):
    async with http_client(ScriptedBackend()) as client:
        response = await client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
