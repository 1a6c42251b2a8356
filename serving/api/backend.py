"""What the HTTP API needs from whatever generates: a Ray handle in a deployment, a plain object in tests."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from serving.config import Profile
from serving.deploy.status import TargetStatus
from serving.requests import Chunk, GenerationRequest
from serving.types import Ids


class Tokenizer(Protocol):
    """The part of `models.tokenizer.ChatTokenizer` that requests pass through."""

    @property
    def name(self) -> str: ...

    @property
    def stop_ids(self) -> frozenset[int]: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> Ids: ...

    def render_chat(self, messages: Sequence[dict[str, str]]) -> Ids: ...

    def decode_raw(self, ids: Sequence[int] | Ids) -> str: ...


class Speller(Protocol):
    """The part that shows single tokens: in log probabilities they go by their text and their bytes."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_text(self, token: int) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


class ServedTokenizer(Tokenizer, Speller, Protocol):
    """Both."""


class Backend(Protocol):
    """Generates for one profile. Closing the iterator of `generate` frees the request in every role."""

    @property
    def profile(self) -> Profile: ...

    @property
    def tokenizer(self) -> ServedTokenizer: ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """The chunks of one request; the last one has a finish reason.

        RequestError and OverloadedError are raised before the first chunk.
        """
        ...

    async def status(self) -> TargetStatus: ...
