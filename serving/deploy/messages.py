"""What travels between a Target and the drafter it leases: ids as int32 bytes, and counts; no arrays.

A session is named by (owner, session_id). The caller says from where its ids are new; the callee crops to
that place first, so a message may arrive twice, or late, and change nothing that is true.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np

from serving.protocols import FeatureRows
from serving.requests import Sampling
from serving.types import Draft, DraftLimits, DraftSource, Ids


class HasIds(Protocol):
    """A piece of a message that carries ids."""

    @property
    def new_ids(self) -> bytes: ...


ItemT = TypeVar("ItemT", bound=HasIds)

MAX_MESSAGE_BYTES = 64 * 1024
# Ids in one message; the rest of MAX_MESSAGE_BYTES is for names and counts, about 100 bytes a session.
MAX_IDS_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class SessionOpening:
    """What stays the same for a session's life; sent until the callee has acknowledged the session."""

    prompt_len: int
    salt: str
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class DraftItem:
    """Keep `base_len` ids, append `new_ids`, then draft at most `max_draft` tokens (0: only keep the ids).

    `features` are for a drafter that reads the target's; with them a message may be larger than MAX_MESSAGE_BYTES.
    """

    session_id: str
    base_len: int
    new_ids: bytes
    max_draft: int
    opening: SessionOpening | None = None
    max_by_source: DraftLimits | None = None
    features: FeatureRows | None = None

    @property
    def length(self) -> int:
        """Ids that the callee holds for this session once it has this item."""
        return self.base_len + len(self.new_ids) // 4

    def pieces(self) -> Iterator["DraftItem"]:
        """The same ids in items of at most MAX_IDS_BYTES, none of which asks for a draft."""
        for start in range(0, len(self.new_ids), MAX_IDS_BYTES):
            piece = self.new_ids[start : start + MAX_IDS_BYTES]
            yield replace(self, base_len=self.base_len + start // 4, new_ids=piece, max_draft=0, features=None)

    def without_ids(self) -> "DraftItem":
        """This item once its ids have been sent ahead."""
        return replace(self, base_len=self.length, new_ids=b"")


@dataclass(frozen=True, slots=True)
class OutcomeItem:
    """How many of the first `num_drafted` tokens drafted by call `number` were accepted."""

    session_id: str
    number: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class CloseItem:
    """Forget a session; where `remember`, its last ids come along, for the text may serve later requests."""

    session_id: str
    base_len: int
    new_ids: bytes
    remember: bool


@dataclass(frozen=True, slots=True)
class DraftCall:
    """One round of one Target: what happened, who left, who wants a draft; applied in this order."""

    owner: str
    incarnation: str
    number: int
    outcomes: tuple[OutcomeItem, ...] = ()
    closes: tuple[CloseItem, ...] = ()
    items: tuple[DraftItem, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftedItem:
    """One draft as bytes: int32 ids, float32 confidences; and what it took."""

    ids: bytes
    source: DraftSource
    confidences: bytes | None
    num_groups: int
    num_passes: int

    @classmethod
    def of(cls, draft: Draft) -> "DraftedItem":
        confidences = None if draft.confidences is None else draft.confidences.astype(np.float32).tobytes()
        return cls(ids_bytes(draft.ids), draft.source, confidences, draft.num_groups, draft.num_passes)

    def draft(self) -> Draft:
        if not self.ids:
            return Draft(num_passes=self.num_passes)
        confidences = None if self.confidences is None else np.frombuffer(self.confidences, dtype=np.float32)
        return Draft(ids_of(self.ids), self.source, confidences, self.num_groups, self.num_passes)


@dataclass(frozen=True, slots=True)
class DraftAnswer:
    """One entry an item of the call, in order; None where the callee lacks the prefix and needs it from 0.

    `compute_s` is the callee's own time: what is left of the call's is the hop.
    """

    incarnation: str
    number: int
    drafts: tuple[DraftedItem | None, ...]
    compute_s: float = field(default=0.0, compare=False)


def packed(pieces: Iterable[ItemT]) -> list[list[ItemT]]:
    """The pieces in order, in groups of at most MAX_IDS_BYTES of ids."""
    groups: list[list[ItemT]] = []
    room = 0
    for piece in pieces:
        if not groups or len(piece.new_ids) > room:
            groups.append([])
            room = MAX_IDS_BYTES
        groups[-1].append(piece)
        room -= len(piece.new_ids)
    return groups


def ids_bytes(ids: Ids | Sequence[int]) -> bytes:
    """i32[n] as 4n bytes."""
    return np.asarray(ids, dtype=np.int32).tobytes()


def ids_of(data: bytes) -> Ids:
    """4n bytes as i32[n], read only."""
    return np.frombuffer(data, dtype=np.int32)
