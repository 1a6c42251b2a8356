"""Several choices of one request: `n`, lists of prompts, echo, and what usage and receipts say of them."""

import asyncio
import json

import openai
import pytest

from serving.api.gateway import create_app
from serving.config import EngineConfig
from serving.errors import OverloadedError
from tests.api.scripted import HANG, PROFILE, ScriptedBackend, chat_body, chunk, http_client, openai_client, text_body
from tests.api.test_disconnect import Connection

TWO = (
    (chunk("a", 1), chunk("b", 2, rounds=2), chunk("", 0, rounds=3, finish_reason="stop")),
    (chunk("xy", 3, 4, finish_reason="length"),),
)


async def streamed(client, body):
    """Each choice's own frames, and the others: a list of choices by index, and the frames without a choice."""
    events = [event async for event in await client.create(**body, stream=True)]
    choices = [[event for event in events if event.choices and event.choices[0].index == at] for at in range(8)]
    return choices, [event for event in events if not event.choices]


async def test_n_whole_chat_choices():
    backend = ScriptedBackend(scripts=TWO)
    answer = await openai_client(backend).chat.completions.create(**chat_body(n=2))
    assert [(choice.index, choice.message.content, choice.finish_reason) for choice in answer.choices] == [
        (0, "ab", "stop"),
        (1, "xy", "length"),
    ]
    assert [request.request_id for request in backend.requests] == [f"{answer.id}-0", f"{answer.id}-1"]
    assert backend.requests[0].prompt_ids.tolist() == backend.requests[1].prompt_ids.tolist()
    assert not hasattr(answer, "speculation")
    assert [choice.speculation["rounds"] for choice in answer.choices] == [3, 1]


async def test_n_streamed_chat_choices_each_with_its_role_text_finish_and_receipt():
    choices, _ = await streamed(openai_client(ScriptedBackend(scripts=TWO)).chat.completions, chat_body(n=2))
    for events, text, reason, rounds in [(choices[0], "ab", "stop", 3), (choices[1], "xy", "length", 1)]:
        deltas = [event.choices[0].delta for event in events]
        assert (deltas[0].role, [delta.role for delta in deltas[1:]]) == ("assistant", [None] * (len(deltas) - 1))
        assert "".join(delta.content or "" for delta in deltas) == text
        finishes = [event.choices[0].finish_reason for event in events]
        assert finishes == [None] * (len(events) - 1) + [reason]
        receipts = [getattr(event, "speculation", None) for event in events]
        assert receipts[:-1] == [None] * (len(events) - 1)
        assert receipts[-1]["rounds"] == rounds


@pytest.mark.parametrize("num_choices", [2, 16])
async def test_choices_of_every_length_lose_nothing_while_they_are_merged(num_choices):
    scripts = [
        [*(chunk(f"{at}.{number} ", number + 1) for number in range(at)), chunk("", 0, finish_reason="stop")]
        for at in range(num_choices)
    ]
    request = text_body(n=num_choices, stream=True)
    texts, finishes = [""] * num_choices, [0] * num_choices
    async for event in await openai_client(ScriptedBackend(scripts=scripts)).completions.create(**request):
        choice = event.choices[0]
        assert not finishes[choice.index], "nothing comes after a choice's finish reason"
        texts[choice.index] += choice.text
        finishes[choice.index] += choice.finish_reason == "stop"
    assert texts == ["".join(f"{at}.{number} " for number in range(at)) for at in range(num_choices)]
    assert finishes == [1] * num_choices


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_counts_every_choice_and_the_prompt_once(stream):
    client = openai_client(ScriptedBackend(scripts=TWO)).chat.completions
    if stream:
        _, (last,) = await streamed(client, chat_body(n=2, stream_options={"include_usage": True}))
        usage = last.usage
    else:
        usage = (await client.create(**chat_body(n=2))).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 5, 8)
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 4)
    assert (details.reasoning_tokens, details.audio_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("n", "cached", "expected"), [(1, [2], 2), (2, [0, 2], 0), (2, [2, 1], 1)]
)  # what one choice computed, others may find cached
async def test_cached_prompt_tokens(n, cached, expected):
    scripts = [[chunk("a", 1, finish_reason="stop", cached_tokens=count)] for count in cached]
    usage = (await openai_client(ScriptedBackend(scripts=scripts)).completions.create(**text_body(n=n))).usage
    assert (usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens_details.audio_tokens) == (expected, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_admitted", [0, 1, 3])
@pytest.mark.parametrize(("route", "body"), [("chat/completions", chat_body), ("completions", text_body)])
async def test_one_choice_without_room_is_a_429_before_any_stream_case_35(route, body, num_admitted, stream):
    scripts = [[chunk("a", 1), HANG]] * num_admitted + [[OverloadedError("full")]] + [[chunk("a", 1), HANG]]
    backend = ScriptedBackend(scripts=scripts)
    async with http_client(backend) as client:
        response = await client.post(f"/v1/{route}", json=body(stream=stream, n=num_admitted + 2))
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    assert response.json()["error"]["code"] == "overloaded"
    assert backend.num_open == 0


async def test_case_35_through_the_official_client():
    backend = ScriptedBackend(scripts=[[chunk("a", 1), HANG], [OverloadedError("full")]])
    with pytest.raises(openai.RateLimitError):
        await openai_client(backend).chat.completions.create(**chat_body(n=2, stream=True))
    assert backend.num_open == 0


async def test_a_choice_that_fails_in_the_stream_ends_all_of_them_with_one_error():
    backend = ScriptedBackend(scripts=[[chunk("a", 1), HANG], [chunk("b", 1), RuntimeError("boom")]])
    async with http_client(backend) as client:
        response = await client.post("/v1/completions", json=text_body(n=2, stream=True))
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["a", "b"]
    assert events[-1]["error"]["code"] == "internal_error"
    assert backend.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_every_choice_case_32(stream):
    backend = ScriptedBackend(scripts=[[chunk("a", 1), HANG], [HANG], [chunk("a", 1, finish_reason="stop")]])
    connection = Connection(text_body(n=3, stream=stream))
    running = asyncio.create_task(connection.run(create_app(backend)))
    await asyncio.wait_for(backend.hanging.wait(), 5)
    while backend.num_open > 2:  # the third has ended by itself
        await asyncio.sleep(0.01)
    connection.leave()
    await asyncio.wait_for(running, 5)
    assert (len(backend.requests), backend.num_open) == (3, 0)


async def test_several_prompts_are_n_choices_each_in_their_order():
    backend = ScriptedBackend(scripts=[[chunk(text, 1, finish_reason="stop")] for text in "abcd"])
    answer = await openai_client(backend).completions.create(**text_body(prompt=["hi", [7, 8, 9]], n=2))
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert [len(request.prompt_ids) for request in backend.requests] == [2, 2, 3, 3]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 4)


@pytest.mark.parametrize(("prompt", "n", "param"), [(["hi"] * 4, 1, "prompt"), ("hi", 4, "n"), (["hi", "ho"], 2, "n")])
async def test_more_answers_than_the_server_takes_are_a_400_that_names_what_asked_for_them(prompt, n, param):
    engine = EngineConfig(max_length=64, max_sessions=1, max_queued=2)
    backend = ScriptedBackend(profile=PROFILE.model_copy(update={"engine": engine}))
    async with http_client(backend) as client:
        response = await client.post("/v1/completions", json=text_body(prompt=prompt, n=n))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "makes 4 answers" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_each_choice(stream):
    backend = ScriptedBackend([chunk("!", 1), chunk("?", 2, finish_reason="stop")])
    client = openai_client(backend).completions
    body = text_body(prompt=["hi", [104, 111]], n=2, echo=True)
    if stream:
        choices, _ = await streamed(client, body)
        texts = ["".join(event.choices[0].text for event in events) for events in choices[:4]]
    else:
        texts = [choice.text for choice in (await client.create(**body)).choices]
    assert texts == ["hi!?", "hi!?", "ho!?", "ho!?"]


@pytest.mark.parametrize("fields", [{"best_of": 1}, {"best_of": 2, "n": 2}, {"suffix": ""}])
async def test_best_of_and_suffix_pass_where_they_change_nothing(fields):
    answer = await openai_client(ScriptedBackend()).completions.create(**text_body(**fields))
    assert {choice.text for choice in answer.choices} == {"Hello!"}
