"""What of a verdict is emitted: stops and the length limit end a block anywhere inside it."""

from dataclasses import dataclass
from typing import Protocol

from serving.requests import Limits
from serving.types import FinishReason, Ids, Verdict, as_ids


class EndsText(Protocol):
    """Takes an emitted token; says whether a stop string is now complete, if the text may end here at all."""

    def __call__(self, token: int, *, may_end: bool) -> bool: ...


@dataclass(frozen=True, slots=True)
class Clipped:
    """Emitted ids (accepted, then recovered or bonus), how many of them are accepted draft tokens, and the end."""

    ids: Ids
    num_accepted: int
    finish_reason: FinishReason | None


def clip(verdict: Verdict, draft_ids: Ids, *, limits: Limits, room: int, ends_text: EndsText) -> Clipped:
    """Walk the accepted tokens, then the target's own; end at the first stop, inclusive, else at `room` tokens.

    `ends_text` is asked once for every emitted token, in order, and says whether a stop string is now complete. A
    stop on the last allowed token is "stop", not "length"; nothing follows an accepted stop. Before
    `limits.min_tokens` nothing is a stop.
    """
    candidates = [int(token) for token in draft_ids[: verdict.num_accepted]]
    if verdict.next_id is not None:
        candidates.append(verdict.next_id)
    emitted: list[int] = []
    reason: FinishReason | None = None
    for token in candidates[:room]:
        emitted.append(token)
        may_end = limits.max_tokens - room + len(emitted) >= limits.min_tokens
        # Both are asked: the text must see a stop id too, for its own bookkeeping.
        ends = ends_text(token, may_end=may_end)
        if ends or (may_end and token in limits.stop_ids):
            reason = "stop"
            break
    if reason is None and len(emitted) >= room:
        reason = "length"
    return Clipped(as_ids(emitted), min(len(emitted), verdict.num_accepted), reason)
