"""From a body's sampling and stopping parameters to the engine's `Sampling` and `Limits`."""

import secrets

from serving.api.backend import Tokenizer
from serving.api.schema import CompletionBody
from serving.api.vocabulary import checked_biases, checked_ids
from serving.errors import RequestError
from serving.requests import Limits, Sampling

SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: the seeds of neighbouring requests do not meet


def base_seed(body: CompletionBody) -> int:
    """The request's seed, or a random one, so that requests without one differ."""
    return secrets.randbits(63) if body.seed is None else body.seed


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice: seed + choice * SEED_STEP as a signed 64-bit number; choice 0 has the seed itself."""
    return (seed + choice * SEED_STEP + 2**63) % 2**64 - 2**63


def limits_of(body: CompletionBody, tokenizer: Tokenizer, *, max_tokens: int) -> Limits:
    """Raises RequestError for a stop id that is no token, and where min_tokens exceeds `max_tokens`."""
    if body.min_tokens > max_tokens:
        raise RequestError(
            "min_tokens",
            f"is {body.min_tokens}, but the answer may have at most {max_tokens} tokens; lower it or raise "
            f"{body.output_limit_field}",
        )
    own = frozenset() if body.ignore_eos else tokenizer.stop_ids
    more = checked_ids(body.stop_token_ids, field="stop_token_ids", vocab_size=tokenizer.vocab_size)
    return Limits(
        max_tokens=max_tokens,
        stop_ids=own.union(more.tolist()),
        stop_strings=tuple(body.stop),
        min_tokens=body.min_tokens,
    )


def sampling_of(body: CompletionBody, tokenizer: Tokenizer, *, seed: int, limits: Limits) -> Sampling:
    """How one choice is sampled. Raises RequestError for a bias on what is no token."""
    return Sampling(
        temperature=body.temperature,
        seed=seed,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias=checked_biases(body.logit_bias, field="logit_bias", vocab_size=tokenizer.vocab_size),
        min_tokens=limits.min_tokens,
        held_ids=tuple(sorted(limits.stop_ids)) if limits.min_tokens else (),
    )
