"""Hybrid drafting (HVD, arXiv 2606.01019): the cache where it is worth it, else a model. Lossless for any choice.

The cache speculates for every session. Where it finds nothing, or its draft is not chosen, the model drafts: for those
sessions only, in one batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from serving.drafters.chooser import Choice, Chooser
from serving.drafters.ready import ReadyDrafts
from serving.drafters.suffix import SuffixDrafter
from serving.drafters.yield_features import History, Position, packed_place
from serving.protocols import Drafter, DraftRequest, Outcome, PendingDrafts
from serving.types import EMPTY_DRAFT, Draft, Ids


@dataclass(frozen=True)
class _Chosen:
    """The batch's drafts, those of the model still under way."""

    drafts: list[Draft]
    modelled: list[int]
    pending: PendingDrafts

    def result(self) -> list[Draft]:
        drafts = list(self.drafts)
        for index, draft in zip(self.modelled, self.pending.result(), strict=True):
            drafts[index] = draft
        return drafts


class HybridDrafter:
    """Any Drafter as the model, of at most `model_max_draft` tokens a draft.

    A cache draft is judged whole and cut to what the round allows afterwards, so that a short round does not make it
    look poor. Where a request lets no model draft, the cache's draft is taken whatever it promises.
    """

    def __init__(self, cache: SuffixDrafter, model: Drafter, chooser: Chooser, *, model_max_draft: int) -> None:
        self._cache = cache
        self._model = model
        self._chooser = chooser
        self._model_max_draft = model_max_draft
        self._histories: dict[str, History] = {}

    @property
    def degraded(self) -> bool:
        return self._model.degraded

    def start(self, requests: Sequence[DraftRequest]) -> PendingDrafts:
        drafts = self._cached(requests)
        modelled = [
            index for index, request in enumerate(requests) if not len(drafts[index]) and self._model_room(request) > 0
        ]
        if not modelled:
            return ReadyDrafts(drafts)
        asked = [replace(requests[index], max_draft=self._model_room(requests[index])) for index in modelled]
        return _Chosen(drafts, modelled, self._model.start(asked))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if len(outcome.draft):
                self._history(outcome.session_id).add(outcome.num_accepted, is_cache=outcome.draft.source == "suffix")
        self._model.observe(outcomes)

    def close(self, session_id: str, ids: Ids | None) -> None:
        self._histories.pop(session_id, None)
        try:
            self._cache.close(session_id, ids)
        finally:
            self._model.close(session_id, ids)

    def _cached(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """The cache's draft for each request where it is chosen, else an empty one."""
        drafts = [EMPTY_DRAFT] * len(requests)
        choices = {index: choice for index, request in enumerate(requests) if (choice := self._choice(request))}
        for index, is_taken in zip(choices, self._chooser.takes_cache(list(choices.values())), strict=True):
            if is_taken or self._model_room(requests[index]) == 0:
                drafts[index] = self._cache.draft(choices[index].match, requests[index])
        return drafts

    def _choice(self, request: DraftRequest) -> Choice | None:
        """What the cache finds for a request, None for nothing."""
        session_id, prompt_len, limits = request.session_id, request.prompt_len, request.max_by_source
        position, history = Position(prompt_len, len(request.ids) - prompt_len), self._history(session_id)
        match = self._cache.match(request, packed_place(position, history))
        if match.empty:
            return None
        rate, price = (1.0, 0.0) if limits is None else (limits.model_rate, limits.row_price)
        return Choice(session_id, match, position, history, min(len(match), request.cache_limit), rate, price)

    def _model_room(self, request: DraftRequest) -> int:
        return min(self._model_max_draft, request.model_limit)

    def _history(self, session_id: str) -> History:
        history = self._histories.get(session_id)
        if history is None:
            history = self._histories[session_id] = History()
        return history
