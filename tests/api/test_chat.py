"""/v1/chat/completions through the official client."""

import pytest
from openai import BadRequestError

from serving.requests import Chunk, Receipt
from tests.api.scripted import MODEL, ScriptedBackend, chat_body, chunk, openai_client

USER = [{"role": "user", "content": "hi"}]


async def streamed(client, **fields):
    return [event async for event in await client.chat.completions.create(**chat_body(stream=True, **fields))]


async def test_a_whole_answer_has_openai_s_shape():
    answer = await openai_client(ScriptedBackend()).chat.completions.create(**chat_body())
    choice = answer.choices[0]
    assert (answer.object, answer.model, len(answer.choices)) == ("chat.completion", MODEL, 1)
    assert answer.id.startswith("chatcmpl-")
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello!")


async def test_the_answer_s_id_is_the_engine_s_request_id_and_never_the_client_s():
    backend = ScriptedBackend()
    client = openai_client(backend)
    ids = {
        (await client.chat.completions.create(**chat_body(), extra_headers={"x-request-id": "same"})).id
        for _ in range(2)
    }
    assert ids == {request.request_id for request in backend.requests}
    assert len(ids) == 2


async def test_a_stream_has_the_role_first_then_text_then_the_finish_reason():
    events = await streamed(openai_client(ScriptedBackend()))
    deltas = [event.choices[0].delta for event in events]
    assert [(delta.role, delta.content) for delta in deltas] == [
        ("assistant", ""),
        (None, "Hel"),
        (None, "lo!"),
        (None, None),
    ]
    assert [event.choices[0].finish_reason for event in events] == [None, None, None, "stop"]
    assert {event.object for event in events} == {"chat.completion.chunk"}
    assert len({(event.id, event.created, event.model) for event in events}) == 1


RECEIPT = {
    "rounds": 3, "drafted": 6, "accepted": 3, "emitted": 6, "replaced": 0, "target_passes": 3, "draft_passes": 0,
    "drafts_empty": 0, "cached_tokens": 0, "resumed": 0, "choices": {}, "degraded": False, "lossless": True,
    "reason": Receipt().reason, "acceptance_rate": 0.5,
}  # fmt: skip


async def test_the_receipt_is_on_the_whole_answer():
    answer = await openai_client(ScriptedBackend()).chat.completions.create(**chat_body())
    assert answer.speculation == RECEIPT


async def test_an_answer_without_drafts_has_no_acceptance_rate():
    script = [Chunk("", (1,), "a", Receipt(rounds=1, emitted=1), finish_reason="stop")]
    answer = await openai_client(ScriptedBackend(script)).chat.completions.create(**chat_body())
    assert answer.speculation["acceptance_rate"] is None


async def test_the_receipt_rides_on_the_chunk_with_the_finish_reason_and_no_other():
    events = await streamed(openai_client(ScriptedBackend()))
    assert [getattr(event, "speculation", None) for event in events] == [None, None, None, RECEIPT]


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_is_what_was_delivered_case_7(stream):
    for num_tokens in range(1, 21):
        script = [chunk("a" * len(ids), *ids) for ids in _rounds_of_six(num_tokens)]
        script.append(chunk("", finish_reason="length"))
        client = openai_client(ScriptedBackend(script))
        if stream:
            events = await streamed(client, stream_options={"include_usage": True}, max_tokens=num_tokens)
            usage = events[-1].usage
        else:
            usage = (await client.chat.completions.create(**chat_body(max_tokens=num_tokens))).usage
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
        assert counts == (3, num_tokens, 3 + num_tokens)


def _rounds_of_six(num_tokens):
    return [range(1, 1 + min(6, num_tokens - start)) for start in range(0, num_tokens, 6)]


async def test_include_usage_adds_one_last_chunk_without_choices():
    events = await streamed(openai_client(ScriptedBackend()), stream_options={"include_usage": True})
    assert [event.usage is None for event in events] == [True] * 4 + [False]
    assert events[-1].choices == []
    assert all("usage" in event.model_fields_set for event in events)


async def test_no_usage_on_the_wire_unless_asked_for():
    assert all("usage" not in event.model_fields_set for event in await streamed(openai_client(ScriptedBackend())))


async def test_a_message_can_be_sent_back_as_it_was_received():
    backend = ScriptedBackend()
    client = openai_client(backend)
    first = (await client.chat.completions.create(**chat_body())).choices[0].message
    messages = [*USER, first.model_dump(), {"role": "user", "content": "and?"}]
    await client.chat.completions.create(model=MODEL, messages=messages)
    assert "".join(map(chr, backend.requests[-1].prompt_ids)) == "uhiaHello!uand?"


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([{"role": "developer", "content": "be"}, *USER], "sbeuhi"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "ua\nb",
        ),
        ([{"role": "user", "content": ""}], "u"),
    ],
)
async def test_messages_reach_the_template(messages, prompt):
    backend = ScriptedBackend()
    await openai_client(backend).chat.completions.create(model=MODEL, messages=messages)
    assert "".join(map(chr, backend.requests[0].prompt_ids)) == prompt
    assert not backend.requests[0].continues_prompt  # a turn begins anew


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, 61),  # the room that is left
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_completion_tokens": 6, "max_tokens": 6}, 6),
        ({"max_tokens": 61}, 61),
    ],
)
async def test_max_tokens(fields, max_tokens):
    backend = ScriptedBackend()
    await openai_client(backend).chat.completions.create(**chat_body(**fields))
    assert backend.requests[0].limits.max_tokens == max_tokens


@pytest.mark.parametrize(("stop", "expected"), [(None, ()), ("\n", ("\n",)), (["a", "bc"], ("a", "bc"))])
async def test_stops_reach_the_engine_with_the_model_s_stop_ids(stop, expected):
    backend = ScriptedBackend()
    await openai_client(backend).chat.completions.create(**chat_body(stop=stop))
    limits = backend.requests[0].limits
    assert (limits.stop_strings, limits.stop_ids) == (expected, frozenset({0}))


@pytest.mark.parametrize(
    ("speculation", "max_draft"),
    [
        (None, None),
        ({}, None),
        ({"mode": "profile"}, None),
        ({"mode": "off"}, 0),
        ({"mode": "off", "max_draft": 0}, 0),
        ({"max_draft": 3}, 3),
        ({"max_draft": 8}, 8),
    ],
)
async def test_speculation_may_be_tightened(speculation, max_draft):
    backend = ScriptedBackend()
    extra = {"speculation": speculation}
    await openai_client(backend).chat.completions.create(**chat_body(), extra_body=extra)
    assert backend.requests[0].max_draft == max_draft


async def test_speculation_may_not_be_loosened():
    extra = {"speculation": {"max_draft": 9}}
    with pytest.raises(BadRequestError) as caught:
        await openai_client(ScriptedBackend()).chat.completions.create(**chat_body(), extra_body=extra)
    assert caught.value.param == "speculation.max_draft"
    assert "is 9, but a request may only lower the 8 of profile 'tiny-suffix'" in caught.value.message


async def test_a_long_conversation_is_tokenised_all_the_same():
    backend = ScriptedBackend(profile=ScriptedBackend.profile.model_copy(update={"engine": _long()}))
    await openai_client(backend).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x" * 30_000}]
    )
    assert len(backend.requests[0].prompt_ids) == 30_001


def _long():
    return ScriptedBackend.profile.engine.model_copy(update={"max_length": 100_000})


async def test_default_max_tokens_is_1024_where_there_is_room():
    backend = ScriptedBackend(profile=ScriptedBackend.profile.model_copy(update={"engine": _long()}))
    await openai_client(backend).chat.completions.create(**chat_body())
    assert backend.requests[0].limits.max_tokens == 1024
