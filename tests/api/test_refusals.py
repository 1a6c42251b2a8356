"""Every parameter is supported, neutral, or a 400 that names it: nothing is silently ignored."""

import json

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as text_params
import pytest

from serving.api.chat_body import ChatBody
from serving.api.text_body import TextBody
from tests.api.scripted import ScriptedBackend, chat_body, http_client, text_body

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}

BOTH = [
    ({"temperature": -1}, "temperature", "must be greater than or equal to 0 (got -1)"),
    ({"temperature": 2.1}, "temperature", "must be less than or equal to 2 (got 2.1)"),
    ({"temperature": "0"}, "temperature", 'must be a valid number (got "0")'),
    ({"temperature": float("nan")}, "temperature", "must be"),
    ({"top_p": 0}, "top_p", "must be greater than 0 (got 0)"),
    ({"top_p": 1.01}, "top_p", "must be less than or equal to 1"),
    ({"n": 0}, "n", "must be greater than or equal to 1"),
    ({"n": 17}, "n", "must be less than or equal to 16 (got 17)"),
    ({"n": True}, "n", "must be a valid integer"),
    ({"presence_penalty": 2.01}, "presence_penalty", "must be less than or equal to 2"),
    ({"presence_penalty": -2.01}, "presence_penalty", "must be greater than or equal to -2"),
    ({"frequency_penalty": float("inf")}, "frequency_penalty", "must be"),
    ({"frequency_penalty": "high"}, "frequency_penalty", "must be a valid number"),
    ({"logit_bias": {"256": 1}}, "logit_bias.256", "is not a token id of this model; they go from 0 to 255"),
    ({"logit_bias": {"7": 101}}, "logit_bias.7", "must be less than or equal to 100 (got 101)"),
    ({"logit_bias": {"7": None}}, "logit_bias.7", "must be a valid number"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1", "is not a token id; keys are ids in decimal"),
    ({"logit_bias": {"07": 1}}, "logit_bias.07", "is not a token id; keys are ids in decimal"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias." + "9" * 40, "is not a token id"),
    ({"logit_bias": [7]}, "logit_bias", "must be a valid dictionary"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "must have at most 1024 items"),
    ({"top_k": -2}, "top_k", "must be greater than or equal to -1"),
    ({"top_k": 1.5}, "top_k", "must be a valid integer"),
    ({"min_p": 1.1}, "min_p", "must be less than or equal to 1"),
    ({"min_p": -0.1}, "min_p", "must be greater than or equal to 0"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "leave it out or send 1"),
    ({"min_tokens": -1}, "min_tokens", "must be greater than or equal to 0"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "is 6, but the answer may have at most 5 tokens"),
    ({"min_tokens": 63}, "min_tokens", "lower it or raise max_"),
    ({"ignore_eos": "yes"}, "ignore_eos", "must be a valid boolean"),
    ({"stop_token_ids": [3, 256]}, "stop_token_ids.1", "is not a token id of this model"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0", "is not a token id of this model"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids.0", "must be a valid integer"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids", "must have at most 64 items"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "leave it out or send true"),
    ({"guided_json": {}}, "guided_json", "is not a parameter of this endpoint; remove it"),
    ({"max_tokens": 0}, "max_tokens", "must be greater than or equal to 1 (got 0)"),
    ({"max_tokens": 1.5}, "max_tokens", "must be a valid integer (got 1.5)"),
    ({"max_tokens": True}, "max_tokens", "must be a valid integer (got true)"),
    ({"max_tokens": 63}, "max_tokens", "is 63, but behind a prompt of"),
    ({"max_tokens": 10**30}, "max_tokens", "must be less than"),
    ({"stop": ""}, "stop", "must have at least 1 character"),
    ({"stop": ["a", ""]}, "stop.1", "must have at least 1 character"),
    ({"stop": list("abcde")}, "stop", "must have at most 4 items"),
    ({"stop": 7}, "stop", "must be a valid list (got 7)"),
    ({"stop": "\ud800"}, "stop", "must be valid Unicode"),
    ({"stop": ["a", "\ud800"]}, "stop.1", "must be valid Unicode"),
    ({"stop": "x" * 257}, "stop", "must have at most 256 characters"),
    ({"seed": "1"}, "seed", "must be a valid integer"),
    ({"stream": "yes"}, "stream", "must be a valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only where stream is true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "is not a parameter"),
    ({"speculation": {"mode": "fast"}}, "speculation.mode", "must be 'profile', 'strict' or 'off' (got \"fast\")"),
    ({"speculation": {"max_draft": -1}}, "speculation.max_draft", "must be greater than or equal to 0"),
    ({"speculation": {"max_draft": 9}}, "speculation.max_draft", "may only lower the 8"),
    ({"speculation": {"mode": "off", "max_draft": 1}}, "speculation.max_draft", "must be 0 or absent"),
    ({"speculation": {"budget": 1}}, "speculation.budget", "has no effect under rule 'strict'"),
    ({"speculation": {"mode": "strict", "budget": 1}}, "speculation.budget", "has no effect where mode is 'strict'"),
    ({"speculation": {"lambda": 1}}, "speculation.lambda", "is not a parameter"),
    *(
        ({"speculation": value}, "speculation", 'must be an object such as {"mode": "off"}')
        for value in (True, "off", 1, ["off"])
    ),
    ({"stream": True, "stream_options": "usage"}, "stream_options", 'must be an object (got "usage")'),
    ({"cache_salt": ""}, "cache_salt", "must have at least 1 character"),
    ({"cache_salt": "\ud800"}, "cache_salt", "must be valid Unicode"),
    ({"model": 3}, "model", "must be a valid string (got 3)"),
    ({"user": 3}, "user", "must be a valid string"),
]
CHAT = [
    ({"tools": [TOOL]}, "tools", "tools and functions cannot be called here"),
    ({"tool_choice": "required"}, "tool_choice", "tools and functions cannot be called here"),
    ({"functions": [{"name": "f"}]}, "functions", "tools and functions cannot be called here"),
    ({"function_call": {"name": "f"}}, "function_call", "tools and functions cannot be called here"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "is not supported"),
    (
        {"response_format": {"type": "json_object"}},
        "response_format",
        'leave it out or send {"type": "text"}',
    ),
    ({"logprobs": 1}, "logprobs", "must be a valid boolean"),
    ({"top_logprobs": 5}, "top_logprobs", "is 5, but is allowed only where logprobs is true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be less than or equal to 20"),
    ({"modalities": ["text", "audio"]}, "modalities", 'leave it out or send ["text"]'),
    ({"audio": {"voice": "x"}}, "audio", "is not supported: leave it out"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction", "is not supported"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "is not supported"),
    ({"verbosity": "low"}, "verbosity", "is not supported"),
    ({"service_tier": "flex"}, "service_tier", "is not supported"),
    ({"store": True}, "store", "answers are not stored here"),
    ({"moderation": {"model": "x"}}, "moderation", "is not supported"),
    ({"prompt_cache_options": {"ttl": "30m"}}, "prompt_cache_options", "is not supported"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", "is not supported"),
    ({"web_search_options": {}}, "web_search_options", "is not supported"),
    ({"metadata": {"a": 1}}, "metadata.a", "must be a valid string (got 1)"),
    ({"best_of": 1}, "best_of", "is not a parameter of this endpoint"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "must be greater than or equal to 1"),
    ({"max_completion_tokens": 62}, "max_completion_tokens", "is 62, but behind a prompt of 3 tokens"),
    ({"max_completion_tokens": 4, "max_tokens": 5}, "max_completion_tokens", "is 4, but max_tokens is 5"),
    ({"messages": None}, "messages", "must be a valid list"),
    ({"messages": []}, "messages", "must have at least 1 item"),
    ({"messages": [{"role": "user", "content": "x" * 63}]}, "messages", "has 64 tokens"),
    ({"messages": ["hi"]}, "messages.0", "must be"),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages.0.role",
        "must be 'system', 'developer', 'user'",
    ),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "is required"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "must be a string or a list"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "must be a string or a list"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content", "must have at least 1 item"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type", "must be 'text'"),
    (
        {"messages": [{"role": "user", "content": "\udc00"}]},
        "messages.0.content",
        "must be valid Unicode",
    ),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages.0.name", "into the content"),
    (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [TOOL]}]},
        "messages.0.tool_calls",
        "tools and functions cannot be called here",
    ),
]
TEXT = [
    ({"prompt": None}, "prompt", "must be a string or a list of token ids, or a list of such prompts"),
    ({"prompt": ""}, "prompt", "must hold at least one token"),
    ({"prompt": []}, "prompt", "must hold at least one token"),
    ({"prompt": ["a"] * 17}, "prompt", "holds 17 prompts, but one request may hold 16; send several requests"),
    ({"prompt": ["a", 1]}, "prompt", "token ids, which are whole numbers"),
    ({"prompt": ["a", ""]}, "prompt.1", "must hold at least one token"),
    ({"prompt": ["a", [1, 256]]}, "prompt.1.1", "is not a token id of this model"),
    ({"prompt": [[1], ["a"]]}, "prompt", "token ids, which are whole numbers"),
    ({"prompt": ["a", "x" * 64]}, "prompt.1", "has 64 tokens"),
    ({"prompt": [1, "a"]}, "prompt", "token ids, which are whole numbers"),
    ({"prompt": [1, True]}, "prompt", "token ids, which are whole numbers"),
    ({"prompt": [1, 2.0]}, "prompt", "token ids, which are whole numbers"),
    ({"prompt": [1, 256]}, "prompt.1", "is not a token id of this model; they go from 0 to 255"),
    ({"prompt": [-1]}, "prompt.0", "is not a token id"),
    ({"prompt": [2**70]}, "prompt.0", "is not a token id"),
    ({"prompt": "\ud800"}, "prompt", "must be valid Unicode"),
    ({"prompt": "x" * 64}, "prompt", "has 64 tokens, but prompt and answer may have 64 together"),
    ({"best_of": 2}, "best_of", "is 2, but answers are not ranked here: leave it out, or ask for n = 2"),
    ({"best_of": 3, "n": 2}, "best_of", "is 3, but answers are not ranked here"),
    ({"echo": True, "logprobs": 0}, "echo", "of the prompt are not supported; leave out echo or logprobs"),
    ({"echo": 1}, "echo", "must be a valid boolean"),
    ({"logprobs": 6}, "logprobs", "must be less than or equal to 5"),
    ({"logprobs": True}, "logprobs", "must be a valid integer"),
    ({"suffix": "x"}, "suffix", "is not supported"),
    ({"messages": []}, "messages", "is not a parameter of this endpoint"),
    ({"max_completion_tokens": 1}, "max_completion_tokens", "is not a parameter of this endpoint"),
]
CASES = [("chat/completions", chat_body, *case) for case in BOTH + CHAT]
CASES += [("completions", text_body, *case) for case in BOTH + TEXT]


@pytest.mark.parametrize(("route", "body", "fields", "param", "sentence"), CASES)
async def test_a_400_names_the_parameter(route, body, fields, param, sentence):
    backend = ScriptedBackend()
    async with http_client(backend) as client:
        response = await _post(client, route, body(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["message"].startswith(f"{param}: ")
    assert sentence in error["message"]
    assert "\n" not in error["message"]
    assert backend.requests == []


async def _post(client, route, body):
    """As JSON in ASCII with NaN: what Python clients do send."""
    headers = {"content-type": "application/json"}
    return await client.post(f"/v1/{route}", content=json.dumps(body), headers=headers)


TAKEN = {
    "temperature": [0, 0.0, 2, None], "top_p": [1, 1.0, 0.01, None], "n": [1, 16, None],
    "presence_penalty": [0, 0.0, -2], "frequency_penalty": [0, 2.0, None],
    "logit_bias": [{}, {"0": -100, "255": 0.5}, None], "stop": [[], None], "seed": [7, -7, None],
    "user": ["u", None], "stream": [False, None], "stream_options": [None], "max_tokens": [None],
    "speculation": [None, {}, {"mode": "strict"}, {"detail": True}],
    "cache_salt": ["s", None], "top_k": [-1, 0, 1, None], "min_p": [0, 1, None],
    "min_tokens": [0, 5, None], "repetition_penalty": [1], "ignore_eos": [False, True, None],
    "stop_token_ids": [[], [0, 255], None], "skip_special_tokens": [True],
}  # fmt: skip
CHAT_TAKEN = TAKEN | {
    "logprobs": [False, True, None], "top_logprobs": [0, None], "metadata": [{"a": "b"}, None],
    "parallel_tool_calls": [True, False, None], "tools": [[], None], "tool_choice": ["none", "auto", None],
    "functions": [[], None], "function_call": ["none", "auto", None], "store": [False, None],
    "response_format": [{"type": "text"}, None],
    "modalities": [["text"], None], "service_tier": ["auto", "default", None], "verbosity": ["medium", None],
    "reasoning_effort": ["none", None], "audio": [None], "prediction": [None], "web_search_options": [None],
    "moderation": [None], "prompt_cache_key": ["k", None], "prompt_cache_options": [{}, None],
    "prompt_cache_retention": ["in_memory", None], "safety_identifier": ["s", None],
    "max_completion_tokens": [None],
}  # fmt: skip
TEXT_TAKEN = TAKEN | {
    "best_of": [1, None],
    "echo": [False, True, None],
    "logprobs": [0, 5, None],
    "suffix": ["", None],
}
PASSING = [("chat/completions", chat_body(**{k: v})) for k, values in CHAT_TAKEN.items() for v in values]
PASSING += [("completions", text_body(**{k: v})) for k, values in TEXT_TAKEN.items() for v in values]


@pytest.mark.parametrize(("route", "body"), PASSING)
async def test_a_supported_or_neutral_value_passes(route, body):
    async with http_client(ScriptedBackend()) as client:
        response = await client.post(f"/v1/{route}", json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("params", "body", "taken", "refused"),
    [
        (chat_params.CompletionCreateParamsBase, ChatBody, CHAT_TAKEN, BOTH + CHAT),
        (text_params.CompletionCreateParamsBase, TextBody, TEXT_TAKEN, BOTH + TEXT),
    ],
)
def test_every_parameter_of_the_official_client_is_known_and_in_these_tables(params, body, taken, refused):
    known = set(params.__annotations__)
    assert known <= set(body.model_fields)
    assert known - set(taken) <= {"model", "messages", "prompt"}
    unsupported = {name for name, info in body.model_fields.items() if info.annotation is type(None)}
    assert unsupported <= {name for fields, _, _ in refused for name in fields}


@pytest.mark.parametrize(
    ("content", "content_type", "sentence"),
    [
        (b"{", "application/json", "The body is not valid JSON: "),
        (b'{"model": "\xff"}', "application/json", "The body could not be read as JSON in UTF-8."),
        (b"[" * 100_000, "application/json", "The body"),
        (b'{"n": ' + b"1" * 5000 + b"}", "application/json", "The body could not be read"),
        (b"[]", "application/json", "The body must be a JSON object"),
        (b'{"\\ud800": 1}', "application/json", "The body could not be read as JSON in UTF-8"),
        (b"null", "application/json", "The body must be a JSON object"),
        (b"", "application/json", "The body must be a JSON object"),
        (b"{}", "text/plain", "sent with the header Content-Type: application/json"),
    ],
)
async def test_a_body_that_is_no_json_object(content, content_type, sentence):
    async with http_client(ScriptedBackend()) as client:
        headers = {"content-type": content_type}
        response = await client.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "invalid_json"


SCHEMA = {"name": "s", "strict": True, "schema": {"type": "object", "properties": {"a": {"type": "string"}}}}


@pytest.mark.parametrize("kind", [{"type": "json_schema", "json_schema": SCHEMA}, {"type": "json_object"}, {}, "text"])
async def test_case_18_a_json_schema_is_refused_and_the_server_goes_on(kind):
    backend = ScriptedBackend()
    async with http_client(backend) as client:
        refused = await client.post("/v1/chat/completions", json=chat_body(response_format=kind))
        answered = await client.post("/v1/chat/completions", json=chat_body())
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "response_format", "unsupported_parameter")
    assert (answered.status_code, len(backend.requests)) == (200, 1)


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "model"),
        ("chat/completions", {"model": "m"}, "messages"),
        ("completions", {"model": "m"}, "prompt"),
    ],
)
async def test_a_missing_parameter_is_named(route, body, param):
    async with http_client(ScriptedBackend()) as client:
        error = (await client.post(f"/v1/{route}", json=body)).json()["error"]
    assert error["message"] == f"{param}: is required"
    assert (error["param"], error["code"]) == (param, "missing_required_parameter")


async def test_too_long_has_openai_s_code():
    async with http_client(ScriptedBackend()) as client:
        response = await client.post("/v1/completions", json=text_body(prompt="x" * 64))
    assert response.json()["error"]["code"] == "context_length_exceeded"
