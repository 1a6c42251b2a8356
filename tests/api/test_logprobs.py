"""Log probabilities in the shapes of both endpoints: one entry a token, nothing lost, nothing twice."""

import math

import pytest

from serving.types import TokenLogprob
from tests.api.scripted import CharTokenizer, ScriptedBackend, chat_body, chunk, http_client, openai_client, text_body


def entry(token: int, logprob: float = -0.5) -> TokenLogprob:
    return TokenLogprob(token, logprob, ((token, logprob), (token + 1, logprob - 1)))


def scored(text: str, *ids: int, **fields):
    return chunk(text, *ids, logprobs=tuple(map(entry, ids)), **fields)


# Its second round is undecided, its last ends with the stop id.
SCRIPT = [scored("Hi", 72, 105), scored("", 46), scored(".!", 33, 0, finish_reason="stop")]
TOKENS = ["H", "i", ".", "!", "<end>"]


async def events_of(create, body):
    return [event async for event in await create(**body, stream=True)]


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"logprobs": True, "top_logprobs": 2}])
async def test_a_whole_chat_answer(fields):
    backend = ScriptedBackend(SCRIPT)
    answer = await openai_client(backend).chat.completions.create(**chat_body(**fields))
    logprobs = answer.choices[0].logprobs
    assert (logprobs.refusal, "refusal" in logprobs.model_fields_set) == (None, True)
    assert [item.token for item in logprobs.content] == TOKENS
    assert logprobs.content[0].model_dump() == {
        "token": "H", "logprob": -0.5, "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.5, "bytes": [72]},
            {"token": "I", "logprob": -1.5, "bytes": [73]},
        ],
    }  # fmt: skip
    assert backend.requests[0].num_logprobs == fields.get("top_logprobs", 0)


async def test_a_chat_stream_has_each_entry_once_also_of_undecided_rounds():
    events = await events_of(openai_client(ScriptedBackend(SCRIPT)).chat.completions.create, chat_body(logprobs=True))
    choices = [event.choices[0] for event in events]
    given = [
        (choice.delta.content, choice.logprobs and [item.token for item in choice.logprobs.content])
        for choice in choices
    ]
    assert given == [("", None), ("Hi", ["H", "i"]), ("", ["."]), (".!", ["!", "<end>"]), (None, None)]
    assert [choice.finish_reason for choice in choices] == [None] * 4 + ["stop"]


@pytest.mark.parametrize("stream", [False, True])
async def test_text_columns_and_offsets(stream):
    create = openai_client(ScriptedBackend(SCRIPT)).completions.create
    if stream:
        parts = [event.choices[0].logprobs for event in await events_of(create, text_body(logprobs=2))]
        assert parts.pop() is None
    else:
        parts = [(await create(**text_body(logprobs=2))).choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == TOKENS
    assert [offset for part in parts for offset in part.text_offset] == [0, 1, 2, 3, 4]
    assert [logprob for part in parts for logprob in part.token_logprobs] == [-0.5] * 5
    assert parts[0].top_logprobs[0] == {"H": -0.5, "I": -1.5}


async def test_text_logprobs_0_lists_the_token_itself():
    backend = ScriptedBackend([chunk("a", 97, logprobs=(TokenLogprob(97, -0.25),), finish_reason="length")])
    answer = await openai_client(backend).completions.create(**text_body(logprobs=0))
    assert answer.choices[0].logprobs.top_logprobs == [{"a": -0.25}]
    assert backend.requests[0].num_logprobs == 0


class ByteTokenizer(CharTokenizer):
    """One id a byte."""

    def token_bytes(self, token):
        return bytes([token])

    def token_text(self, token):
        return f"bytes:\\x{token:02x}" if token > 127 else chr(token)


async def test_half_characters_have_bytes_and_begin_where_their_character_does():
    ids = "\N{WATER WAVE}a".encode()
    script = [scored("", *ids[:2]), scored("\N{WATER WAVE}a", *ids[2:], finish_reason="length")]
    backend = ScriptedBackend(script, tokenizer=ByteTokenizer())
    text = (await openai_client(backend).completions.create(**text_body(logprobs=1))).choices[0].logprobs
    assert (text.text_offset, text.tokens[0]) == ([0, 0, 0, 0, 1], "bytes:\\xf0")
    chat = (await openai_client(backend).chat.completions.create(**chat_body(logprobs=True))).choices[0].logprobs
    assert bytes(byte for item in chat.content for byte in item.bytes).decode() == "\N{WATER WAVE}a"


async def test_a_special_token_within_the_text_takes_no_place_in_it():
    backend = ScriptedBackend([scored("ab", 97, 0, 98, finish_reason="length")])
    answer = await openai_client(backend).completions.create(**text_body(logprobs=0), extra_body={"ignore_eos": True})
    assert answer.choices[0].logprobs.text_offset == [0, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_case_03_after_a_stop_string_entries_are_as_many_as_tokens_of_usage(stream):
    script = [scored("ab", 97, 98), scored("", 88, 89, finish_reason="stop")]  # the text of the stop, XY, is cut
    create = openai_client(ScriptedBackend(script)).chat.completions.create
    body = chat_body(stop="XY", logprobs=True)
    if stream:
        events = await events_of(create, body | {"stream_options": {"include_usage": True}})
        choices, usage = [event.choices[0] for event in events[:-1]], events[-1].usage
        text = "".join(choice.delta.content or "" for choice in choices)
    else:
        answer = await create(**body)
        choices, usage, text = answer.choices, answer.usage, answer.choices[0].message.content
    tokens = [item.token for choice in choices if choice.logprobs for item in choice.logprobs.content]
    assert (text, tokens, usage.completion_tokens) == ("ab", ["a", "b", "X", "Y"], 4)


async def test_choices_keep_their_own_entries():
    scripts = [[scored("ab", 97, 98, finish_reason="stop")], [scored("c", 99, finish_reason="stop")]]
    events = await events_of(
        openai_client(ScriptedBackend(scripts=scripts)).completions.create, text_body(n=2, logprobs=1)
    )
    given = {event.choices[0].index: event.choices[0].logprobs for event in events if event.choices[0].text}
    assert [(given[at].tokens, given[at].text_offset) for at in range(2)] == [(["a", "b"], [0, 1]), (["c"], [0])]


@pytest.mark.parametrize("fields", [{}, {"logprobs": False}, {"logprobs": None}])
async def test_none_unless_asked_for(fields):
    backend = ScriptedBackend(SCRIPT)
    answer = await openai_client(backend).chat.completions.create(**chat_body(**fields))
    assert (answer.choices[0].logprobs, backend.requests[0].num_logprobs) == (None, None)


async def test_what_is_impossible_is_a_number_all_the_same():
    backend = ScriptedBackend([chunk("a", 97, logprobs=(entry(97, -math.inf),), finish_reason="length")])
    async with http_client(backend) as client:
        response = await client.post("/v1/completions", json=text_body(logprobs=1))
    assert response.json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
