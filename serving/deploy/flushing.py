"""How often a stream leaves the Target: every round, or several rounds in one piece where hops are dear."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from serving.requests import Chunk
from serving.types import TokenLogprob


class Flusher:
    """Hands on the first chunk at once, then `interval` chunks joined in one; the last one is never held back.

    Called on the engine thread, which is spared the wake-ups as well.
    """

    def __init__(self, hand_on: Callable[[Chunk], None], *, interval: int) -> None:
        self._hand_on = hand_on
        self._interval = interval
        self._held: list[Chunk] = []
        self._is_first = True

    def __call__(self, chunk: Chunk) -> None:
        self._held.append(chunk)
        if self._is_first or chunk.finish_reason is not None or len(self._held) >= self._interval:
            self._is_first = False
            self._hand_on(joined(self._held))
            self._held = []


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
