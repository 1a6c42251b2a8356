"""A guard for drafters with two sources: a look-up that costs next to nothing, and a model that costs its passes.

Each source has its own account with every session, so a model that does not pay is left off without holding the cache
up, and what the cache gains never pays for a model's losses.
"""

from collections.abc import Mapping

from serving.decode.guard import Guard
from serving.types import Draft, DraftLimits

_SMOOTHING = 0.1


class SourceGuard:
    """Implements DraftPolicy by one Guard a source."""

    def __init__(self, *, cache: Guard, model: Guard) -> None:
        self._cache = cache
        self._model = model
        self._limits: dict[str, DraftLimits] = {}
        self._lookup_s: float | None = None  # of one session; known once a round did without the model

    def limits(self, session_id: str, batch_size: int, num_tokens: int, *, is_greedy: bool = True) -> DraftLimits:
        floor = self._model.floor(batch_size, is_greedy=is_greedy)
        num_modelled = self._model.limit(session_id, batch_size, num_tokens, floor=floor)
        limits = DraftLimits(
            self._cache.limit(session_id, batch_size, num_tokens),
            num_modelled,
            model_floor=floor,
            model_rate=self._model.rate(session_id, batch_size, num_modelled),
            row_price=self._model.row_price(batch_size),
        )
        self._limits[session_id] = limits
        return limits

    def observe(self, session_id: str, batch_size: int, draft: Draft, num_accepted: int) -> None:
        if self._is_models(session_id, draft):
            self._model.observe(session_id, batch_size, draft, num_accepted)
            return
        self._model.fall_behind(session_id)
        self._cache.observe(session_id, batch_size, draft, num_accepted)

    def record_drafts(self, drafts: Mapping[str, Draft], draft_s: float) -> None:
        """The model is charged for what a round takes longer than its look-ups alone."""
        modelled = {key: draft for key, draft in drafts.items() if self._is_models(key, draft)}
        cached = {key: draft for key, draft in drafts.items() if key not in modelled}
        if drafts and not modelled:
            seconds = draft_s / len(drafts)
            before = seconds if self._lookup_s is None else self._lookup_s
            self._lookup_s = before + _SMOOTHING * (seconds - before)
        lookup_s = self._lookup_s or 0.0
        self._cache.record_drafts(cached, min(draft_s, lookup_s * len(cached)))
        self._model.record_drafts(modelled, max(0.0, draft_s - lookup_s * len(cached)))

    def record_pass(self, *, rows: int, verify_s: float) -> None:
        self._cache.record_pass(rows=rows, verify_s=verify_s)
        self._model.record_pass(rows=rows, verify_s=verify_s)

    def forget(self, session_id: str) -> None:
        self._limits.pop(session_id, None)
        self._cache.forget(session_id)
        self._model.forget(session_id)

    def _is_models(self, session_id: str, draft: Draft) -> bool:
        """Where nothing was drafted the model was asked last, if it was allowed to."""
        limits = self._limits.get(session_id)
        return draft.source != "suffix" and limits is not None and limits.model > 0
