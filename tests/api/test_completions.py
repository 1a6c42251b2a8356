"""/v1/completions through the official client."""

import pytest

from tests.api.scripted import MODEL, ScriptedBackend, chunk, openai_client, text_body


async def test_a_whole_answer_has_openai_s_shape():
    answer = await openai_client(ScriptedBackend()).completions.create(**text_body())
    choice = answer.choices[0]
    assert (answer.object, answer.model, len(answer.choices)) == ("text_completion", MODEL, 1)
    assert answer.id.startswith("cmpl-")
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == ("Hello!", 0, "stop", None)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 5)
    assert answer.speculation["acceptance_rate"] == 0.5


async def test_a_stream_ends_with_the_finish_reason_the_receipt_and_usage():
    request = text_body(stream=True, stream_options={"include_usage": True})
    events = [event async for event in await openai_client(ScriptedBackend()).completions.create(**request)]
    assert [event.choices[0].text for event in events[:-1]] == ["Hel", "lo!", ""]
    assert [event.choices[0].finish_reason for event in events[:-1]] == [None, None, "stop"]
    assert [hasattr(event, "speculation") for event in events] == [False, False, True, False]
    assert (events[-1].choices, events[-1].usage.completion_tokens) == ([], 5)


async def test_length_is_a_finish_reason():
    backend = ScriptedBackend([chunk("a", 1, finish_reason="length")])
    answer = await openai_client(backend).completions.create(**text_body(max_tokens=1))
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 1)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [("hi", [104, 105]), (["hi"], [104, 105]), ([104, 255], [104, 255]), ([[7, 0]], [7, 0])],
)
async def test_one_prompt_as_text_or_ids(prompt, ids):
    backend = ScriptedBackend()
    await openai_client(backend).completions.create(model=MODEL, prompt=prompt)
    assert backend.requests[0].prompt_ids.tolist() == ids
    assert backend.requests[0].prompt_ids.dtype == "int32"
    assert backend.requests[0].continues_prompt
