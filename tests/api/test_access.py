"""API keys, request ids, the access log, the bound on bodies, tenants."""

import hashlib
import logging
import re

import httpx2
import openai
import pytest
from ray.serve._private.http_util import RequestIdMiddleware

from serving.api.gateway import MAX_BODY_BYTES, create_app
from tests.api.scripted import HELLO, MODEL, ScriptedBackend, chat_body, http_client, openai_client, text_body

KEYS = frozenset({"key-one", "schlüssel-zwei"})


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic key-one", "key-one", "Bearer key-on"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/openapi.json", "/nowhere", "/health/x"])
async def test_without_a_right_key_every_path_but_the_probes_is_401(header, path):
    async with http_client(ScriptedBackend(), api_keys=KEYS) as client:
        response = await client.get(path, headers={} if header is None else {"authorization": header})
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"


async def test_the_key_is_asked_for_before_the_body_is_read():
    async with http_client(ScriptedBackend(), api_keys=KEYS) as client:
        assert (await client.post("/v1/completions", content=b"{")).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_need_no_key(path):
    async with http_client(ScriptedBackend(), api_keys=KEYS) as client:
        assert (await client.get(path)).status_code == 200


async def test_the_official_client_with_a_right_and_a_wrong_key():
    right = openai_client(ScriptedBackend(), api_key="key-one", api_keys=KEYS)
    assert (await right.chat.completions.create(**chat_body())).choices[0].message.content == "Hello!"
    wrong = openai_client(ScriptedBackend(), api_key="key-two", api_keys=KEYS)
    with pytest.raises(openai.AuthenticationError):
        await wrong.chat.completions.create(**chat_body())


async def test_without_keys_any_client_may_come():
    async with http_client(ScriptedBackend()) as client:
        assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    ("token", "salt", "tenant"),
    [
        ("key-one", None, hashlib.sha256(b"key-one").hexdigest()[:16]),
        ("key-one", "mine", "mine"),
        (None, "mine", "mine"),
        (None, None, ""),
    ],
)
async def test_the_tenant_is_the_salt_or_the_token_s_hash_case_29(token, salt, tenant):
    backend = ScriptedBackend()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with http_client(backend) as client:
        await client.post("/v1/completions", json=text_body(cache_salt=salt), headers=headers)
    assert backend.requests[0].salt == tenant


@pytest.mark.parametrize("given", ["abc", "3f2504e0-4f89-11d3-9a0c-0305e82c3301", "A.b:c@d/e+f=g", "x" * 128])
async def test_a_harmless_request_id_comes_back(given):
    async with http_client(ScriptedBackend()) as client:
        response = await client.get("/health", headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "a b", "a\tb", 'a"b', "x" * 129, "a%0ab", "ü"])
async def test_any_other_request_id_is_replaced(given):
    headers = {} if given is None else {b"x-request-id": given.encode("latin-1")}
    async with http_client(ScriptedBackend()) as client:
        response = await client.get("/health", headers=headers)
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


async def ask_behind_ray(caplog, headers):
    """The request ids of a response that passed Ray's middleware, and the one that we have logged."""
    caplog.set_level(logging.INFO, logger="serving.api.record")
    app = RequestIdMiddleware(create_app(ScriptedBackend(), sends_request_id=False))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test") as client:
        response = await client.get("/health", headers=headers)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "serving.api.record"]
    return response.headers.get_list("x-request-id"), line.split()[0].removeprefix("request_id=")


@pytest.mark.parametrize(
    ("given", "logged"), [("abc", "abc"), ("a b", "a%20b"), ("a=b c", "a%3Db%20c"), ("x" * 129, "x" * 128)]
)
async def test_behind_ray_an_id_comes_back_once_and_is_harmless_in_the_log(given, logged, caplog):
    assert await ask_behind_ray(caplog, {"x-request-id": given}) == ([given], logged)


async def test_behind_ray_its_own_id_is_ours_too(caplog):
    (sent,), logged = await ask_behind_ray(caplog, {})
    assert sent == logged


async def test_every_answer_has_a_request_id_and_the_official_client_sees_it():
    answer = await openai_client(ScriptedBackend()).chat.completions.create(
        **chat_body(), extra_headers={"x-request-id": "mine"}
    )
    assert answer._request_id == "mine"
    async with http_client(ScriptedBackend()) as client:
        for response in [await client.get("/nowhere"), await client.post("/v1/completions", content=b"{")]:
            assert response.headers["x-request-id"]


PROMPT, SALT, KEY, USER = "my-secret-question", "my-secret-salt", "key-one", "my-secret-user"


@pytest.mark.parametrize("stream", [False, True])
async def test_one_log_line_a_request_with_ids_and_counts_and_no_text(stream, caplog):
    caplog.set_level(logging.DEBUG)
    backend = ScriptedBackend()
    body = text_body(prompt=PROMPT, stream=stream, cache_salt=SALT, user=USER)
    headers = {"x-request-id": "r-1", "authorization": f"Bearer {KEY}"}
    async with http_client(backend) as client:
        await client.post("/v1/completions?q=my-secret-query", json=body, headers=headers)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "serving.api.record"]
    completion_id = backend.requests[0].request_id
    assert line.startswith(
        f"request_id=r-1 completion_id={completion_id} method=POST route=/v1/completions "
        "status=200 outcome=complete duration_ms="
    )
    assert line.endswith(f"prompt_tokens={len(PROMPT)} completion_tokens=5")
    assert re.search(r" duration_ms=\d+\.\d ", line)
    ours = "".join(r.getMessage() for r in caplog.records if r.name.startswith("serving"))
    assert not any(secret in ours for secret in (PROMPT, SALT, KEY, USER, "my-secret", HELLO[0].text))


REFUSED = [
    ("/v1/completions", text_body(prompt=PROMPT, temperature=3)),
    ("/v1/completions", text_body(prompt=PROMPT * 10)),
    ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": {"x": PROMPT}}]}),
    ("/v1/chat/completions", {"model": PROMPT, "messages": [{"role": "user", "content": PROMPT}]}),
    (f"/v1/{PROMPT}", {}),
]


@pytest.mark.parametrize(("path", "body"), REFUSED)
async def test_a_refusal_does_not_log_the_prompt_either(path, body, caplog):
    caplog.set_level(logging.DEBUG, logger="serving")
    async with http_client(ScriptedBackend()) as client:
        response = await client.post(path, json=body)
    ours = "".join(record.getMessage() for record in caplog.records if record.name.startswith("serving"))
    assert 400 <= response.status_code < 500
    assert f"status={response.status_code}" in ours
    assert "my-secret" not in ours


async def test_a_body_over_the_limit_is_413_announced_or_not():
    async def pieces():
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b"x" * 2**20

    async with http_client(ScriptedBackend()) as client:
        announced = await client.post("/v1/completions", content=b"x" * (MAX_BODY_BYTES + 1))
        chunked = await client.post("/v1/completions", content=pieces())
    for response in (announced, chunked):
        assert response.status_code == 413
        assert response.json()["error"]["message"] == f"The body may have at most {MAX_BODY_BYTES} bytes."


async def test_a_body_in_pieces_is_put_together():
    async def pieces():
        yield b'{"model": "tiny-chat", '
        yield b'"prompt": "hi"}'

    async with http_client(ScriptedBackend()) as client:
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=pieces(), headers=headers)
    assert response.json()["choices"][0]["text"] == "Hello!"
