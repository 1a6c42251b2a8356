"""The load client against a real server: what it counts, how many streams it holds, and every way an answer fails."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from jobs.load import Counts, Sample, ask, connected, run_level
from serving.errors import ConfigError
from serving.requests import Chunk, GenerationRequest
from tests.api.scripted import HELLO, ScriptedBackend, create_app
from tests.jobs.http_server import RawEvents, chat_request, served

FINISH = 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}'
USAGE = 'data: {"choices": [], "usage": {"completion_tokens": 3}}'


async def asked(url: str) -> Sample:
    async with connected(url, None) as client:
        return await ask(client, chat_request())


async def test_tokens_times_and_receipt_come_from_the_stream() -> None:
    with served(create_app(ScriptedBackend())) as url:
        sample = await asked(url)
    assert sample.error is None
    assert sample.timing.tokens == 5  # the stop token included
    assert sample.timing.first_s is not None
    assert sample.timing.last_s is not None
    assert 0.0 < sample.timing.first_s <= sample.timing.last_s
    assert sample.counts == Counts(accepted=3, rounds=3, drafts_empty=0)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_url_may_end_as_openai_clients_take_it(suffix: str) -> None:
    with served(create_app(ScriptedBackend())) as url:
        assert (await asked(url + suffix)).error is None


@pytest.mark.parametrize(
    ("lines", "status", "error"),
    [
        ([FINISH, USAGE, "data: [DONE]"], 200, None),
        ([USAGE, "data: [DONE]"], 200, "the stream ended without a finish reason and usage"),
        ([FINISH, "data: [DONE]"], 200, "the stream ended without a finish reason and usage"),
        ([], 200, "the stream ended without a finish reason and usage"),
        (['data: {"error": {"message": "worn out"}}'], 200, "the answer broke off: worn out"),
        (["data: {no json"], 200, "the stream holds an event that is no chunk of OpenAI's"),
        (['{"error": {"message": "too\\nmuch"}}'], 429, "HTTP 429: too much"),
        (["<h1>Bad gateway</h1>"], 502, "HTTP 502: <h1>Bad gateway</h1>"),
    ],
)
async def test_an_answer_is_whole_or_says_why_not(lines: list[str], status: int, error: str | None) -> None:
    with served(RawEvents(lines, status)) as url:
        assert (await asked(url)).error == error


async def test_an_event_may_come_in_pieces() -> None:
    content = 'data: {"choices": [{"delta": {"content": "hi"}}]}\r'
    with served(RawEvents([content, FINISH, USAGE, "data: [DONE]"], piece=7)) as url:
        sample = await asked(url)
    assert (sample.error, sample.timing.tokens) == (None, 3)
    assert sample.timing.first_s is not None


async def test_a_server_that_is_gone_is_an_error_of_the_request() -> None:
    with served(RawEvents([])) as url:
        pass
    assert "connect" in str((await asked(url)).error).lower()


async def test_no_url_at_all_is_named() -> None:
    with pytest.raises(ConfigError, match="--serve: 'http://host:port' is no URL"):
        await asked("http://host:port")


@dataclass
class Gate(ScriptedBackend):
    """Lets no request end before `width` of them are open; notes the most that were."""

    width: int = 1
    most_open: int = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        self.num_open += 1
        try:
            self.most_open = max(self.most_open, self.num_open)
            async with asyncio.timeout(10.0):
                while self.most_open < self.width:
                    await asyncio.sleep(0.001)
            for chunk in HELLO:
                yield replace(chunk, request_id=request.request_id)
        finally:
            self.num_open -= 1


async def test_a_level_holds_so_many_streams_and_sends_every_request() -> None:
    backend, done = Gate(width=3), []
    with served(create_app(backend)) as url:
        async with connected(url, None) as client:
            run = await run_level(client, [chat_request(f"p{i}") for i in range(7)], 3, lambda: done.append(1))
    assert backend.most_open == 3
    assert sorted(sample.prompt_id for sample in run.samples) == [f"p{i}" for i in range(7)]
    assert [sample.error for sample in run.samples] == [None] * 7
    assert len(done) == len(backend.requests) == 7
    assert run.seconds > 0.0
