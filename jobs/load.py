"""A client that keeps so many streams of /v1/chat/completions open at once and times each as it comes in."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from pydantic import BaseModel, ValidationError

from jobs.figures import Timing
from serving.errors import ConfigError, DrafthouseError

# A queue may hold the first token back for long.
_PATIENCE = ClientTimeout(total=None, sock_connect=10.0, sock_read=300.0)
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
async def connected(url: str, api_key: str | None) -> AsyncIterator[ClientSession]:
    """A client of the application at `url`, with or without /v1, and no bound on its connections.

    aiohttp's takes a third of the CPU of httpx's for a piece of a stream, which the application may need.
    """
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    base = url.rstrip("/").removesuffix("/v1") + "/"
    try:
        client = ClientSession(
            base, headers=headers, timeout=_PATIENCE, connector=TCPConnector(limit=0), trust_env=True
        )
    except ValueError as error:
        raise ConfigError(f"--serve: {url!r} is no URL: {error}") from None
    async with client:
        yield client


async def models(client: ClientSession, url: str) -> list[str]:
    """What /v1/models of the application at `url` lists, one name or more.

    Raises ConfigError where a key is missing, DrafthouseError where nobody answers.
    """
    try:
        async with client.get("v1/models") as response:
            status, content = response.status, await response.read()
    except (ClientError, TimeoutError) as error:
        raise DrafthouseError(f"--serve: {url} cannot be reached: {_said(error)}") from None
    if status == 401:
        raise ConfigError(f"--api-key-env: {url} asks for an API key; name a variable that holds a valid one")
    try:
        listed = [card.id for card in _Models.model_validate_json(content).data] if status == 200 else []
    except ValidationError:
        listed = []
    if not listed:
        raise DrafthouseError(f"--serve: {url} answers /v1/models with status {status} and no list of models")
    return listed


async def run_level(
    client: ClientSession, requests: Sequence[Request], concurrency: int, on_done: Callable[[], object]
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


async def ask(client: ClientSession, request: Request) -> Sample:
    """Send one request and read its stream to the end; what goes wrong is in the sample."""
    answer, pieces, started_s = _Answer(), list[tuple[float, bytes]](), time.perf_counter()
    broken: str | None = None
    try:
        async with client.post("v1/chat/completions", json=request.body) as response:
            if response.status != 200:
                answer.error = _refusal(response.status, await response.read())
                return answer.sample(request.prompt_id)
            # Read when all is there: until then the application may need the cores.
            async for piece in response.content.iter_any():
                pieces.append((time.perf_counter() - started_s, piece))
    except (ClientError, TimeoutError) as error:
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
    """An exception as one line; some say nothing but their name."""
    return " ".join(str(error).split()) or type(error).__name__
