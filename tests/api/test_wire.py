"""What is on the wire, byte by byte: text in pieces, and the order of keys."""

import json

import pytest

from serving.decode.text import TextStream
from tests.api.scripted import ScriptedBackend, chat_body, chunk, http_client, openai_client, text_body

TEXT = "caf\u00e9 \N{WATER WAVE}\N{ROCKET} \u6c34\u6ce2 na\u00efve \N{FAMILY}\u200d\N{GIRL}!"


def rounds(size: int):
    """TEXT as an engine with one token a byte gives it, `size` of them a round."""
    tokens = TEXT.encode()
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    for start in range(0, len(tokens), size):
        block = tokens[start : start + size]
        for token in block:
            stream.push(token)
        yield chunk(stream.take(), *block)
    yield chunk(stream.finish(), finish_reason="length")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
async def test_concatenated_deltas_are_the_text_and_hold_no_replacement_character_case_6(size):
    client = openai_client(ScriptedBackend(list(rounds(size))))
    whole = (await client.chat.completions.create(**chat_body())).choices[0].message.content
    events = [event async for event in await client.chat.completions.create(**chat_body(stream=True))]
    deltas = [event.choices[0].delta.content or "" for event in events]
    assert "".join(deltas) == whole == TEXT
    assert not any("\ufffd" in delta for delta in deltas)


async def post(route, body):
    backend = ScriptedBackend([chunk("a", 97, logprobs=(), finish_reason="stop")])
    async with http_client(backend) as client:
        return (await client.post(f"/v1/{route}", json=body)).text


HEAD = ["id", "object", "created", "model", "choices"]
USAGE = [
    "prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details", "completion_tokens_details",
]  # fmt: skip
CHOICES = {
    ("chat/completions", False): ["index", "message", "logprobs", "finish_reason"],
    ("chat/completions", True): ["index", "delta", "logprobs", "finish_reason"],
    ("completions", False): ["text", "index", "logprobs", "finish_reason"],
    ("completions", True): ["text", "index", "logprobs", "finish_reason"],
}


@pytest.mark.parametrize(("route", "body"), [("chat/completions", chat_body), ("completions", text_body)])
async def test_keys_come_in_openai_s_order(route, body):
    whole = json.loads(await post(route, body()))
    assert (list(whole), list(whole["usage"])) == ([*HEAD, "usage", "speculation"], USAGE)
    assert list(whole["choices"][0]) == CHOICES[route, False]
    several = json.loads(await post(route, body(n=2)))
    assert (list(several), list(several["choices"][0])) == ([*HEAD, "usage"], [*CHOICES[route, False], "speculation"])


@pytest.mark.parametrize(("route", "body"), [("chat/completions", chat_body), ("completions", text_body)])
async def test_keys_of_a_stream(route, body):
    lines = (await post(route, body(stream=True, stream_options={"include_usage": True}))).split("\n\n")
    *frames, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert [list(frame["choices"][0]) for frame in frames] == [CHOICES[route, True]] * len(frames)
    assert [list(frame) for frame in frames[:-1]] == [[*HEAD, "usage"]] * (len(frames) - 1)
    assert (list(frames[-1]), frames[-1]["usage"]) == ([*HEAD, "usage", "speculation"], None)
    assert (list(last), last["choices"], list(last["usage"])) == ([*HEAD, "usage"], [], USAGE)
