"""What travels between a Target and the slim verifier it leases: ids, and one column a number of each row; no logits.

A session is named by (owner, session_id). As with drafts the caller says from where its ids are new, and the callee
crops to that place first, so a message may arrive twice and change nothing that is true.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from serving.deploy.messages import MAX_IDS_BYTES, ids_bytes, ids_of
from serving.requests import Sampling
from serving.types import Floats, Ids, ScoreTable


@dataclass(frozen=True, slots=True)
class SlimOpening:
    """What stays the same for a session's life; sent until the callee has acknowledged the session."""

    prompt_len: int
    salt: str
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class SlimItem:
    """Keep `base_len` ids, append `new_ids`, then score the last `num_rows` positions (0: only keep the ids)."""

    session_id: str
    base_len: int
    new_ids: bytes
    num_rows: int
    opening: SlimOpening | None = None

    def pieces(self) -> Iterator["SlimItem"]:
        """The same ids in items of at most MAX_IDS_BYTES, none of which asks for scores."""
        for start in range(0, len(self.new_ids), MAX_IDS_BYTES):
            piece = self.new_ids[start : start + MAX_IDS_BYTES]
            yield replace(self, base_len=self.base_len + start // 4, new_ids=piece, num_rows=0)

    def without_ids(self) -> "SlimItem":
        """This item once its ids have been sent ahead."""
        return replace(self, base_len=self.base_len + len(self.new_ids) // 4, new_ids=b"")


@dataclass(frozen=True, slots=True)
class SlimCall:
    """One round of one Target: who left, then what is to be scored."""

    owner: str
    incarnation: str
    number: int
    closes: tuple[str, ...] = ()
    items: tuple[SlimItem, ...] = ()


@dataclass(frozen=True, slots=True)
class ScoredItem:
    """A score table as bytes: i32[S] next_ids; f32 columns next, top, logsumexp [S] and draft [K]. Empty: not yet."""

    next_ids: bytes = b""
    top_ids: bytes = b""
    next_logits: bytes = b""
    top_logits: bytes = b""
    logsumexp: bytes = b""
    draft_logits: bytes = b""

    @classmethod
    def of(cls, table: ScoreTable | None) -> "ScoredItem":
        if table is None:
            return cls()
        assert table.logsumexp is not None, "a slim verifier scores with logsumexp"
        floats = (table.next_logits, table.top_logits, table.logsumexp, table.draft_logits)
        return cls(
            ids_bytes(table.next_ids), ids_bytes(table.top_ids), *(part.astype(np.float32).tobytes() for part in floats)
        )

    def table(self, draft_ids: Ids) -> ScoreTable | None:
        if not self.next_ids:
            return None
        return ScoreTable(
            draft_ids=draft_ids,
            next_ids=ids_of(self.next_ids),
            next_logits=_floats(self.next_logits),
            draft_logits=_floats(self.draft_logits),
            top_ids=ids_of(self.top_ids),
            top_logits=_floats(self.top_logits),
            logsumexp=_floats(self.logsumexp),
        )


@dataclass(frozen=True, slots=True)
class SlimAnswer:
    """One entry an item of the call, in order; None where the callee lacks the prefix and needs it from 0."""

    incarnation: str
    number: int
    tables: tuple[ScoredItem | None, ...]
    compute_s: float = field(default=0.0, compare=False)


def _floats(data: bytes) -> Floats:
    return np.frombuffer(data, dtype=np.float32)
