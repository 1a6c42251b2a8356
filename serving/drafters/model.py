"""Drafts from a small causal LM, one token a pass for the whole batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from serving.drafters.ready import ReadyDrafts
from serving.protocols import DraftRequest, Outcome, ScoreRequest, ScoringModel
from serving.requests import Sampling
from serving.types import WORTH_A_PASS, Draft, DraftSource, DraftStops, Ids, as_ids

_OTHER_NOISE = 0x5DEECE66D

# Greedy drafts behind texts in one call, None for a text whose prompt is still being fed; None for all where the model
# is asked token by token.
DraftAll: TypeAlias = Callable[[Sequence[ScoreRequest], DraftStops], list[Draft | None] | None]


@dataclass
class _Drafting:
    """One request while its draft grows."""

    request: DraftRequest
    room: int
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    reach: float = 1.0  # how likely all of `tokens` are
    num_passes: int = 0
    is_stopped: bool = False
    whole: Draft | None = None

    @property
    def is_open(self) -> bool:
        return not self.is_stopped and len(self.tokens) < self.room

    @property
    def score_request(self) -> ScoreRequest:
        ids = np.concatenate([self.request.ids, as_ids(self.tokens)])
        asked = self.request
        return ScoreRequest(asked.session_id, ids, sampling=self.sampling, prompt_len=asked.prompt_len)

    def add(self, token: int, confidence: float, *, least: float) -> None:
        """Draft `token`, or end the draft before it."""
        self.num_passes += 1
        self.reach *= confidence
        if confidence < least or self.reach < self.request.model_floor:
            self.is_stopped = True
            return
        self.tokens.append(token)
        self.confidences.append(confidence)
        self.is_stopped = self.reach < WORTH_A_PASS * self.request.model_floor

    def take(self, draft: Draft | None) -> None:
        """All of the draft at once, None for none this round."""
        self.is_stopped, self.whole = True, draft

    def draft(self, source: DraftSource) -> Draft:
        if self.whole is not None:
            return self.whole
        if not self.tokens:
            return Draft(num_passes=self.num_passes)
        confidences = np.array(self.confidences, dtype=np.float32)
        return Draft(as_ids(self.tokens), source, confidences, num_passes=self.num_passes)


class ModelDrafter:
    """A draft LM, or a head that behaves as one. Where its own context ends, speculation ends; the request goes on.

    A draft ends before the first token whose probability is below `min_confidence`, or that is reached and right less
    likely than its request wants (the model must return logsumexp, else all tokens pass for certain). A sampled
    request is drafted with the target's own noise, which makes equal picks likely; not so if `is_coupled` is false,
    for comparison. `draft_all` is the model's, if it can draft by itself.
    """

    degraded = False

    def __init__(
        self, model: ScoringModel, *, max_length: int, min_confidence: float = 0.0, is_coupled: bool = True,
        source: DraftSource = "model", draft_all: DraftAll | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._source = source
        self._max_length = max_length
        self._min_confidence = min_confidence
        self._is_coupled = is_coupled
        self._draft_all = draft_all
        self._open: set[str] = set()

    @property
    def num_sessions(self) -> int:
        return len(self._open)

    def start(self, requests: Sequence[DraftRequest]) -> ReadyDrafts:
        """Drafts at once: on shared cores there is nothing to gain from waiting elsewhere."""
        drafting = [_Drafting(request, self._room(request), self._sampling(request)) for request in requests]
        for entry in drafting:
            if entry.is_open and entry.request.session_id not in self._open:
                entry.is_stopped = not self._has_opened(entry.request)
        self._draft_at_once([entry for entry in drafting if entry.is_open and entry.sampling.is_greedy])
        while active := [entry for entry in drafting if entry.is_open]:
            self._extend(active)
        return ReadyDrafts([entry.draft(self._source) for entry in drafting])

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """An independent model learns nothing online."""

    def close(self, session_id: str, ids: Ids | None) -> None:
        if session_id in self._open:
            self._open.remove(session_id)
            self._model.close(session_id)

    def _has_opened(self, request: DraftRequest) -> bool:
        """Whether there was a row for the session; without one it goes on, without drafts, until one is free."""
        try:
            self._model.open(request.session_id, request.ids, salt=request.salt)
        except KeyError:
            return False
        self._open.add(request.session_id)
        return True

    def _sampling(self, request: DraftRequest) -> Sampling:
        sampling = request.sampling
        return sampling if self._is_coupled else replace(sampling, seed=sampling.seed ^ _OTHER_NOISE)

    def _room(self, request: DraftRequest) -> int:
        return min(request.max_draft, self._max_length - len(request.ids))

    def _draft_at_once(self, active: Sequence[_Drafting]) -> None:
        """Whole drafts in one call, where the model takes it."""
        if self._draft_all is None or not active:
            return
        stops = DraftStops(
            np.array([entry.room for entry in active]),
            np.array([entry.request.model_floor for entry in active], dtype=np.float32),
            self._min_confidence,
        )
        drafts = self._draft_all([entry.score_request for entry in active], stops)
        if drafts is not None:
            for entry, draft in zip(active, drafts, strict=True):
                entry.take(draft)

    def _extend(self, active: Sequence[_Drafting]) -> None:
        """One more token for each; a request whose prompt is still being fed gets no draft this round."""
        tables = self._model.score([entry.score_request for entry in active])
        for entry, table in zip(active, tables, strict=True):
            if table is None:
                entry.is_stopped = True
                continue
            confidence = 1.0 if table.logsumexp is None else float(np.exp(table.next_logits[0] - table.logsumexp[0]))
            entry.add(int(table.next_ids[0]), confidence, least=self._min_confidence)
