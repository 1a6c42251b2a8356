"""A client that keeps so many streams of /v1/chat/completions open at once and times each as it comes in."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from pydantic import BaseModel, ValidationError

from jobs.figures import Timing
from serving.errors import ConfigError, DrafthouseError

_PATIENCE = httpx.Timeout(300.0, connect=10.0)  # s; a queue may hold the first token back for long
_DATA, _END = b"data: ", b"[DONE]"
_MAX_MESSAGE = 200


class Counts(BaseModel):
    """What this client reads of a receipt."""

    accepted: int
    rounds: int
    drafts_empty: int


class _Delta(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Usage(BaseModel):
    completion_tokens: int


class _Error(BaseModel):
    message: str


class _Event(BaseModel):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    speculation: Counts | None = None
    error: _Error | None = None


class _Refusal(BaseModel):
    error: _Error


class _Card(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Card]


@dataclass(frozen=True)
class Request:
    """A prompt's id and the body that is sent."""

    prompt_id: str
    body: dict[str, object]


@dataclass(frozen=True)
class Sample:
    """One request as its client saw it, in seconds from when it was sent; `error` is why it is no answer."""

    prompt_id: str
    timing: Timing
    counts: Counts | None = None
    error: str | None = None


@dataclass(frozen=True)
class LevelRun:
    """All requests of one level, in the order in which they ended."""

    concurrency: int
    seconds: float
    samples: Sequence[Sample]


@asynccontextmanager
async def connected(url: str, api_key: str | None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application at `url`, with or without /v1, and no bound on its connections."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    base, limits = url.rstrip("/").removesuffix("/v1"), httpx.Limits(max_connections=None)
    try:
        client = httpx.AsyncClient(base_url=base, headers=headers, timeout=_PATIENCE, limits=limits)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--serve: {url!r} is no URL: {error}") from None
    async with client:
        yield client


async def models(client: httpx.AsyncClient) -> list[str]:
    """What /v1/models lists, one name or more.

    Raises ConfigError where a key is missing, DrafthouseError where nobody answers.
    """
    try:
        response = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise DrafthouseError(f"--serve: {client.base_url} cannot be reached: {_said(error)}") from None
    if response.status_code == 401:
        raise ConfigError(
            f"--api-key-env: {client.base_url} asks for an API key; name a variable that holds a valid one"
        )
    try:
        listed = [card.id for card in _Models.model_validate_json(response.raise_for_status().content).data]
    except (httpx.HTTPStatusError, ValidationError):
        listed = []
    if not listed:
        raise DrafthouseError(
            f"--serve: {client.base_url} answers /v1/models with status {response.status_code} and no list of models"
        )
    return listed


async def run_level(
    client: httpx.AsyncClient, requests: Sequence[Request], concurrency: int, on_done: Callable[[], object]
) -> LevelRun:
    """Send `requests` in order, `concurrency` at once: as one ends, the next begins."""
    waiting, samples = iter(requests), list[Sample]()

    async def stream() -> None:
        for request in waiting:  # the streams share the iterator
            samples.append(await ask(client, request))
            on_done()

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as streams:
        for _ in range(concurrency):
            streams.create_task(stream())
    return LevelRun(concurrency, time.perf_counter() - started_s, samples)


async def ask(client: httpx.AsyncClient, request: Request) -> Sample:
    """Send one request and read its stream to the end; what goes wrong is in the sample."""
    answer, pieces, started_s = _Answer(), list[tuple[float, bytes]](), time.perf_counter()
    broken: str | None = None
    try:
        async with client.stream("POST", "/v1/chat/completions", json=request.body) as response:
            if response.status_code != 200:
                answer.error = _refusal(response.status_code, await response.aread())
                return answer.sample(request.prompt_id)
            # Read when all is there: until then the application may need the cores.
            async for piece in response.aiter_bytes():
                pieces.append((time.perf_counter() - started_s, piece))
    except httpx.HTTPError as error:
        broken = _said(error)
    try:
        for now_s, line in _lines(pieces):
            if line.startswith(_DATA):
                answer.take(line.removeprefix(_DATA), now_s)
    except ValidationError:
        answer.error = "the stream holds an event that is no chunk of OpenAI's"
    answer.error = broken or answer.error
    return answer.sample(request.prompt_id)


def _lines(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Whole lines, each with the time of the piece that it ends in."""
    rest = b""
    for now_s, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield now_s, line.rstrip(b"\r")


@dataclass
class _Answer:
    """One answer as it comes in; the finishing chunk, not the usage behind it, is its end."""

    first_s: float | None = None
    last_s: float | None = None
    tokens: int | None = None
    counts: Counts | None = None
    error: str | None = None

    def take(self, data: bytes, now_s: float) -> None:
        if data == _END:
            return
        event = _Event.model_validate_json(data)
        if event.error is not None:
            self.error = f"the answer broke off: {event.error.message[:_MAX_MESSAGE]}"
        if event.usage is not None:
            self.tokens = event.usage.completion_tokens
        self.counts = event.speculation or self.counts
        for choice in event.choices:
            if choice.delta.content and self.first_s is None:
                self.first_s = now_s
            if choice.finish_reason:
                self.last_s = now_s

    def sample(self, prompt_id: str) -> Sample:
        error = self.error
        if error is None and (self.last_s is None or self.tokens is None):
            error = "the stream ended without a finish reason and usage"
        return Sample(prompt_id, Timing(self.tokens or 0, self.first_s, self.last_s), self.counts, error)


def _refusal(status: int, content: bytes) -> str:
    try:
        message = _Refusal.model_validate_json(content).error.message
    except ValidationError:
        message = content.decode(errors="replace")
    return f"HTTP {status}: {' '.join(message.split())[:_MAX_MESSAGE]}"


def _said(error: Exception) -> str:
    """An exception as one line; some of httpx's say nothing but their name."""
    return " ".join(str(error).split()) or type(error).__name__
