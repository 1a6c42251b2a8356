"""From a validated body and its prompt ids to a GenerationRequest: limits, overrides, tenant."""

import asyncio
import hashlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from serving.api.backend import Backend
from serving.api.errors import ContextLengthError
from serving.api.schema import CompletionBody
from serving.config import Profile
from serving.errors import RequestError
from serving.types import GenerationRequest, Ids, Limits, Sampling

DEFAULT_MAX_TOKENS = 1024
LONG_TEXT_CHARS = 20_000
TENANT_CHARS = 16


@dataclass(frozen=True)
class Prompt:
    """A prompt as ids, and the parameter it came from."""

    ids: Ids
    field: str


async def tokenised(encode: Callable[[], Ids], *, num_chars: int) -> Ids:
    """`encode()`, in a thread where the text is long enough to hold up other requests."""
    return await asyncio.to_thread(encode) if num_chars > LONG_TEXT_CHARS else encode()


def tenant_of(body: CompletionBody, *, token: str) -> str:
    """What separates one client's caches from another's: its `cache_salt`, else its token, unreadably."""
    if body.cache_salt is not None:
        return body.cache_salt
    return hashlib.sha256(token.encode()).hexdigest()[:TENANT_CHARS] if token else ""


def generation_request(
    body: CompletionBody, prompt: Prompt, *, id_prefix: str, backend: Backend, tenant: str
) -> GenerationRequest:
    """The engine's request. Raises RequestError where it asks for more than the profile allows.

    Its id is always ours: the engine needs it unique, which a client's need not be.
    """
    profile = backend.profile
    room = _room(prompt, profile)
    return GenerationRequest(
        request_id=f"{id_prefix}-{uuid.uuid4().hex}",
        prompt_ids=prompt.ids,
        limits=Limits(
            max_tokens=_max_tokens(body, num_prompt_tokens=len(prompt.ids), room=room),
            stop_ids=backend.tokenizer.stop_ids,
            stop_strings=tuple(body.stop),
        ),
        sampling=Sampling(seed=body.seed or 0),
        max_draft=_max_draft(body, profile),
        salt=tenant,
    )


def _room(prompt: Prompt, profile: Profile) -> int:
    """New tokens that fit behind the prompt, at least one."""
    num_prompt_tokens, max_length = len(prompt.ids), profile.engine.max_length
    if num_prompt_tokens == 0:
        raise RequestError(prompt.field, "must hold at least one token")
    if num_prompt_tokens >= max_length:
        raise ContextLengthError(
            prompt.field,
            f"has {num_prompt_tokens} tokens, but prompt and answer may have {max_length} together, which "
            f"leaves no room for an answer; shorten it to at most {max_length - 1}",
        )
    return max_length - num_prompt_tokens


def _max_tokens(body: CompletionBody, *, num_prompt_tokens: int, room: int) -> int:
    wanted = body.output_limit
    if wanted is None:
        return min(DEFAULT_MAX_TOKENS, room)
    if wanted > room:
        raise ContextLengthError(
            body.output_limit_field,
            f"is {wanted}, but behind a prompt of {num_prompt_tokens} tokens there is room for {room}; "
            f"ask for at most {room}, or shorten the prompt",
        )
    return wanted


def _max_draft(body: CompletionBody, profile: Profile) -> int | None:
    wanted = body.draft_limit
    if wanted is not None and wanted > profile.max_draft:
        raise RequestError(
            "speculation.max_draft",
            f"is {wanted}, but a request may only lower the {profile.max_draft} of profile {profile.name!r}",
        )
    return wanted
