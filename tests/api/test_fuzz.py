"""No body makes a 500: it is answered, or refused with a parameter and a sentence."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from serving.api.chat_body import ChatBody
from serving.api.gateway import create_app
from serving.api.text_body import TextBody
from tests.api.scripted import ScriptedBackend, chat_body, text_body

CLIENT = TestClient(create_app(ScriptedBackend()), raise_server_exceptions=False)
TEXTS = st.text(st.characters(), max_size=20)  # halves of surrogate pairs included
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=10,
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": VALUES}), max_size=3)


def fields_of(body):
    names = st.sampled_from(sorted(body.model_fields)) | TEXTS
    return st.dictionaries(names, VALUES, max_size=4)


def post(route, body):
    headers = {"content-type": "application/json"}
    return CLIENT.post(f"/v1/{route}", content=json.dumps(body), headers=headers)


def assert_is_answered_or_explained(response):
    if response.status_code == 200:
        assert "[DONE]" in response.text or is_complete(response.json())
        return
    error = response.json()["error"]
    assert response.status_code in (400, 404)
    assert error["message"]
    assert "\n" not in error["message"].replace(error["param"] or "", "")


def is_complete(answer):
    return answer["usage"]["completion_tokens"] == 5 * len(answer["choices"]) > 0


@settings(max_examples=150, deadline=None)
@given(fields_of(ChatBody), MESSAGES | st.just(chat_body()["messages"]))
def test_no_chat_body_makes_a_500(fields, messages):
    assert_is_answered_or_explained(post("chat/completions", chat_body(messages=messages) | fields))


@settings(max_examples=150, deadline=None)
@given(fields_of(TextBody))
def test_no_text_body_makes_a_500(fields):
    assert_is_answered_or_explained(post("completions", text_body() | fields))


@settings(max_examples=50, deadline=None)
@given(VALUES | st.binary(max_size=50))
def test_no_bytes_make_a_500(value):
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    for route in ("chat/completions", "completions"):
        response = CLIENT.post(f"/v1/{route}", content=content, headers={"content-type": "application/json"})
        assert_is_answered_or_explained(response)
