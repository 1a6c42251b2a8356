"""A backend that yields a script, and the clients that talk to the gateway over it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import httpx2
from openai import AsyncOpenAI

from serving.api.gateway import create_app
from serving.config import EngineConfig, Profile, SuffixDrafter
from serving.deploy.status import TargetStatus
from serving.requests import Chunk, GenerationRequest, Receipt
from serving.types import Ids, as_ids

MODEL = "tiny-chat"
PROFILE = Profile(name="tiny-suffix", drafter=SuffixDrafter(max_draft=8), engine=EngineConfig(max_length=64))
READY = TargetStatus(True, False, 0, 0, {})
HANG = object()


@dataclass(frozen=True)
class CharTokenizer:
    """One id a character; a chat is its contents, each behind its role's first letter."""

    name: str = MODEL
    stop_ids: frozenset[int] = frozenset({0})
    vocab_size: int = 256

    special_ids: frozenset[int] = frozenset({0})

    def encode(self, text: str) -> Ids:
        return as_ids([ord(character) % self.vocab_size for character in text])

    def render_chat(self, messages: Sequence[dict[str, str]]) -> Ids:
        return self.encode("".join(turn["role"][0] + turn["content"] for turn in messages))

    def decode_raw(self, ids: Sequence[int] | Ids) -> str:
        return "".join(map(chr, ids))

    def token_text(self, token: int) -> str:
        return chr(token) if token else "<end>"

    def token_bytes(self, token: int) -> bytes:
        return self.token_text(token).encode()


def chunk(text: str, *ids: int, rounds: int = 1, cached_tokens: int = 0, **fields) -> Chunk:
    """One round's chunk, with a receipt in which each of `rounds` drafted 2 tokens, and 1 was accepted."""
    receipt = Receipt(
        rounds=rounds, drafted=2 * rounds, accepted=rounds, emitted=2 * rounds, target_passes=rounds,
        cached_tokens=cached_tokens,
    )  # fmt: skip
    return Chunk("", ids, text, receipt, **fields)


HELLO = (chunk("Hel", 1, 2), chunk("", 3, rounds=2), chunk("lo!", 4, 0, rounds=3, finish_reason="stop"))


@dataclass
class ScriptedBackend:
    """Yields `script` for every request: chunks go out, an exception is raised, HANG waits for ever.

    With `scripts`, request after request has the next of them.
    """

    script: Sequence[Chunk | Exception | object] = HELLO
    scripts: Sequence[Sequence[Chunk | Exception | object]] = ()
    profile: Profile = PROFILE
    tokenizer: CharTokenizer = CharTokenizer()
    target_status: TargetStatus | Exception = READY
    requests: list[GenerationRequest] = field(default_factory=list)
    num_open: int = 0
    hanging: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        script = self.scripts[(len(self.requests) - 1) % len(self.scripts)] if self.scripts else self.script
        self.num_open += 1
        try:
            for step in script:
                if isinstance(step, Exception):
                    raise step
                if step is HANG:
                    self.hanging.set()
                    await asyncio.Event().wait()
                yield replace(step, request_id=request.request_id)
        finally:
            await asyncio.sleep(0.01)  # freeing takes a call: the gateway must wait for it, even when cancelled
            self.num_open -= 1

    async def status(self) -> TargetStatus:
        if isinstance(self.target_status, Exception):
            raise self.target_status
        return self.target_status


def http_client(backend: ScriptedBackend, **options) -> httpx2.AsyncClient:
    """Plain HTTP against the gateway, in process."""
    app = create_app(backend, **options)
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://test")


def openai_client(backend: ScriptedBackend, *, api_key: str = "key", **options) -> AsyncOpenAI:
    """The official client against the gateway, in process."""
    http = http_client(backend, **options)
    return AsyncOpenAI(base_url="http://test/v1", api_key=api_key, max_retries=0, http_client=http)


def chat_body(**fields) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def text_body(**fields) -> dict[str, object]:
    return {"model": MODEL, "prompt": "hi", **fields}
