"""From a validated body and its prompts to GenerationRequests: one a choice, with limits, overrides, tenant."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from serving.api.backend import Backend
from serving.api.errors import ContextLengthError
from serving.api.sampling import base_seed, choice_seed, limits_of, sampling_of
from serving.api.schema import CompletionBody
from serving.config import Profile
from serving.errors import RequestError
from serving.requests import GenerationRequest
from serving.rules.tighten import rule_for
from serving.types import Ids

DEFAULT_MAX_TOKENS = 1024
LONG_TEXT_CHARS = 20_000
TENANT_CHARS = 16


@dataclass(frozen=True)
class Prompt:
    """A prompt as ids, the parameter it came from, and what of it each choice repeats before its own text.

    A raw one is gone on from in mid-sentence.
    """

    ids: Ids
    field: str
    echo: str = ""
    is_raw: bool = False


async def tokenised(encode: Callable[[], Ids], *, num_chars: int) -> Ids:
    """`encode()`, in a thread where the text is long enough to hold up other requests."""
    return await asyncio.to_thread(encode) if num_chars > LONG_TEXT_CHARS else encode()


def tenant_of(body: CompletionBody, *, token: str) -> str:
    """What separates one client's caches from another's: its `cache_salt`, else its token, unreadably."""
    if body.cache_salt is not None:
        return body.cache_salt
    return hashlib.sha256(token.encode()).hexdigest()[:TENANT_CHARS] if token else ""


def generation_requests(
    body: CompletionBody, prompts: Sequence[Prompt], *, completion_id: str, backend: Backend, tenant: str
) -> list[GenerationRequest]:
    """The engine's requests, `body.n` for each prompt: choice i of prompt p is at p * n + i.

    Their ids are ours, `completion_id` itself or with the choice behind it: the engine needs them unique. Each prompt
    is seeded as if it came alone. Raises RequestError where the body asks for more than the profile allows.
    """
    requests = [request for prompt in prompts for request in _choices(body, prompt, backend=backend, tenant=tenant)]
    most = backend.profile.engine.max_sessions + backend.profile.engine.max_queued
    if len(requests) > most:
        field = "prompt" if body.n == 1 else "n"
        raise RequestError(field, f"makes {len(requests)} answers, but this server takes at most {most}; ask for fewer")
    if len(requests) == 1:
        return [replace(requests[0], request_id=completion_id)]
    return [replace(request, request_id=f"{completion_id}-{index}") for index, request in enumerate(requests)]


def _choices(body: CompletionBody, prompt: Prompt, *, backend: Backend, tenant: str) -> list[GenerationRequest]:
    profile, tokenizer, seed = backend.profile, backend.tokenizer, base_seed(body)
    max_tokens = _max_tokens(body, num_prompt_tokens=len(prompt.ids), room=_room(prompt, profile))
    limits = limits_of(body, tokenizer, max_tokens=max_tokens)
    sampling = sampling_of(body, tokenizer, seed=seed, limits=limits)
    first = GenerationRequest(
        request_id="",
        prompt_ids=prompt.ids,
        limits=limits,
        sampling=sampling,
        max_draft=_max_draft(body, profile),
        num_logprobs=body.num_logprobs,
        salt=tenant,
        tightening=body.speculation.tightening,
        wants_tiers=body.speculation.detail,
        continues_prompt=prompt.is_raw,
    )
    rule_for(profile.rule, first)
    return [replace(first, sampling=replace(sampling, seed=choice_seed(seed, choice))) for choice in range(body.n)]


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
    wanted = body.speculation.draft_limit
    if wanted is not None and wanted > profile.max_draft:
        raise RequestError(
            "speculation.max_draft",
            f"is {wanted}, but a request may only lower the {profile.max_draft} of profile {profile.name!r}",
        )
    return wanted
