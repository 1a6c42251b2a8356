"""The Target's half of the drafter protocol: what the drafter is known to hold, what to send. No Ray."""

from collections.abc import Sequence

from serving.deploy.messages import (
    MAX_IDS_BYTES,
    CloseItem,
    DraftAnswer,
    DraftCall,
    DraftItem,
    OutcomeItem,
    SessionOpening,
    ids_bytes,
    packed,
)
from serving.protocols import DraftRequest, FeatureRows, Outcome, ReadFeatures
from serving.requests import Sampling
from serving.types import EMPTY_DRAFT, Draft, Ids


class SessionSync:
    """Acknowledged lengths of one Target's sessions on one drafter. Touched by the engine thread only.

    Only an answer moves an acknowledged length, so a lost, late or refused call is made good by the next one.
    Outcomes and closes are sent once: calls arrive in order, or the drafter and all it knew are gone.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._incarnation = ""
        self._number = 0
        self._acked: dict[str, int] = {}
        self._fed: dict[str, int] = {}
        self._read_features: ReadFeatures | None = None
        self._drafted_by: dict[str, int] = {}
        self._outcomes: list[OutcomeItem] = []
        self._closes: list[CloseItem] = []

    @property
    def incarnation(self) -> str:
        return self._incarnation

    @property
    def num_sessions(self) -> int:
        """Open sessions that the drafter has been told of."""
        return len(self._acked)

    @property
    def has_closes(self) -> bool:
        return bool(self._closes)

    def feed(self, read_features: ReadFeatures) -> None:
        """Send the target's features of committed positions along."""
        self._read_features = read_features

    def reset(self, incarnation: str) -> None:
        """A drafter that knows nothing yet: every open session is sent from 0 when it next drafts."""
        self._incarnation = incarnation
        self._acked = dict.fromkeys(self._acked, 0)
        self._fed.clear()
        self._drafted_by.clear()
        self._outcomes.clear()
        self._closes.clear()

    def prepare(self, requests: Sequence[DraftRequest]) -> list[DraftCall]:
        """The calls of one round, to be sent in order; the last one is the one whose answer counts."""
        items = [self._item(request) for request in requests]
        if sum(len(item.new_ids) for item in items) <= MAX_IDS_BYTES:
            return [self._call(items)]
        ahead = [self._call(group) for group in packed([piece for item in items for piece in item.pieces()])]
        last = self._call([item.without_ids() for item in items])
        return [*ahead, last]

    def flush(self) -> DraftCall:
        """A call without a request: what is left to tell when nobody drafts."""
        return self._call([])

    def absorb(self, call: DraftCall, answer: DraftAnswer) -> list[Draft]:
        """One draft an item of `call`. An answer to another call, or of another process, drafts nothing."""
        if (answer.incarnation, answer.number) != (self._incarnation, call.number):
            return [EMPTY_DRAFT] * len(call.items)
        return [
            self._absorb_item(item, None if found is None else found.draft(), call.number)
            for item, found in zip(call.items, answer.drafts, strict=True)
        ]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep what became of drafts that came from the drafter; sent with the next call."""
        for outcome in outcomes:
            number = self._drafted_by.pop(outcome.session_id, None)
            if number is not None and len(outcome.draft):
                item = OutcomeItem(outcome.session_id, number, len(outcome.draft), outcome.num_accepted)
                self._outcomes.append(item)

    def close(self, session_id: str, ids: Ids | None) -> None:
        """Tell the drafter with the next call; a session it never heard of needs no word."""
        acked = self._acked.pop(session_id, None)
        self._fed.pop(session_id, None)
        self._drafted_by.pop(session_id, None)
        if acked is None:
            return
        rest = b"" if ids is None else ids_bytes(ids[acked:])
        told = sum(len(close.new_ids) for close in self._closes)
        is_kept = ids is not None and told + len(rest) <= MAX_IDS_BYTES
        self._closes.append(CloseItem(session_id, acked, rest if is_kept else b"", is_kept))

    def _item(self, request: DraftRequest) -> DraftItem:
        acked = self._acked.setdefault(request.session_id, 0)
        opening = None if acked else SessionOpening(request.prompt_len, request.salt, drawing_of(request.sampling))
        return DraftItem(
            session_id=request.session_id,
            base_len=acked,
            new_ids=ids_bytes(request.ids[acked:]),
            max_draft=request.max_draft,
            opening=opening,
            max_by_source=request.max_by_source,
            features=self._features(request),
        )

    def _features(self, request: DraftRequest) -> FeatureRows | None:
        """Of the positions that the drafter lacks; the last token's is not known before the next pass."""
        if self._read_features is None:
            return None
        start = self._fed.get(request.session_id, 0)
        return self._read_features(request.session_id, request.ids[:-1], start)

    def _call(self, items: Sequence[DraftItem]) -> DraftCall:
        self._number += 1
        outcomes, self._outcomes = tuple(self._outcomes), []
        closes, self._closes = tuple(self._closes), []
        return DraftCall(self._owner, self._incarnation, self._number, outcomes, closes, tuple(items))

    def _absorb_item(self, item: DraftItem, draft: Draft | None, number: int) -> Draft:
        if item.session_id not in self._acked:  # closed meanwhile
            return EMPTY_DRAFT
        if draft is None:
            self._acked[item.session_id] = self._fed[item.session_id] = 0
            return EMPTY_DRAFT
        self._acked[item.session_id] = item.length
        if item.features is not None:
            self._fed[item.session_id] = item.features.stop
        if len(draft):
            self._drafted_by[item.session_id] = number
        return draft


def drawing_of(sampling: Sampling) -> Sampling:
    """What a drafter needs to draw like the target, but for what changes logits: biases may be many."""
    return Sampling(
        sampling.temperature, sampling.seed, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p
    )
