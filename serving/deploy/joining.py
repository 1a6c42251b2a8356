"""Chunks of one request joined where they wait for one another."""

from collections.abc import Sequence
from dataclasses import replace

from serving.requests import Chunk
from serving.types import TokenLogprob


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Consecutive chunks of one request as one: state and end are the last one's."""
    if len(chunks) == 1:
        return chunks[0]
    logprobs: list[TokenLogprob] = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    return replace(
        chunks[-1],
        ids=tuple(token for chunk in chunks for token in chunk.ids),
        text="".join(chunk.text for chunk in chunks),
        tiers=tuple(tier for chunk in chunks for tier in chunk.tiers),
        exceptions=tuple(exception for chunk in chunks for exception in chunk.exceptions),
        seen=tuple(pair for chunk in chunks for pair in chunk.seen),
        logprobs=None if all(chunk.logprobs is None for chunk in chunks) else tuple(logprobs),
    )
