"""The mutable state of one request. Touched by the engine thread only."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from serving.requests import GenerationRequest, Limits, Receipt, Sampling
from serving.types import NOTHING_EMITTED, FinishReason, Ids, Ledger, ScoreTable, Verdict


class AcceptanceRule(Protocol):
    """Judges blocks of one sequence. Judging is pure: doing it twice never charges twice."""

    @property
    def is_lossless(self) -> bool: ...

    def judge(self, scores: ScoreTable, ledger: Ledger) -> Verdict: ...

    def learn(self, emitted: Verdict) -> None:
        """Hear what of a verdict was emitted, once; what a later block is judged by may depend on it."""
        ...


@dataclass
class Session:
    """Tokens, ledger and counts of one request.

    Invariant: every role's cache holds at most len(tokens) - 1 positions, for the last token has no KV yet.
    """

    request_id: str
    prompt_len: int
    limits: Limits
    sampling: Sampling
    salt: str
    max_draft: int
    num_logprobs: int | None
    rule: AcceptanceRule
    ledger: Ledger
    receipt: Receipt
    wants_tiers: bool = False
    is_strict: bool = False
    round: int = 0
    finish_reason: FinishReason | None = None
    _buffer: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int32), repr=False)
    _length: int = 0

    @classmethod
    def admit(cls, request: GenerationRequest, rule: AcceptanceRule, *, max_draft: int) -> "Session":
        """A session for `request`; what an earlier replica delivered counts as output, not as prompt."""
        capacity = len(request.prompt_ids) + request.limits.max_tokens
        buffer = np.zeros(capacity, dtype=np.int32)
        known = np.concatenate([request.prompt_ids, request.resume_ids]).astype(np.int32)
        buffer[: len(known)] = known
        wanted = max_draft if request.max_draft is None else min(max_draft, request.max_draft)
        return cls(
            request_id=request.request_id,
            prompt_len=len(request.prompt_ids),
            limits=request.limits,
            sampling=request.sampling,
            salt=request.salt,
            max_draft=wanted,
            num_logprobs=request.num_logprobs,
            rule=rule,
            ledger=request.ledger,
            receipt=request.receipt or Receipt(),
            wants_tiers=request.wants_tiers,
            is_strict=request.is_strict,
            _buffer=buffer,
            _length=len(known),
        )

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Ids:
        """Prompt and output so far; a view whose content never changes, for commits only append behind it."""
        return self._buffer[: self._length]

    @property
    def output_ids(self) -> Ids:
        return self._buffer[self.prompt_len : self._length]

    @property
    def num_emitted(self) -> int:
        return self._length - self.prompt_len

    @property
    def room(self) -> int:
        """New tokens still allowed."""
        return self.limits.max_tokens - self.num_emitted

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def draft_room(self) -> int:
        """The largest K that can pay: the target's own token takes the last place in `room`."""
        return max(0, min(self.max_draft, self.room - 1))

    def tokens_with(self, draft_ids: Ids) -> Ids:
        """Committed tokens followed by `draft_ids`, as one array."""
        return np.concatenate([self.tokens, draft_ids]) if len(draft_ids) else self.tokens

    def commit(self, ids: Ids, verdict: Verdict, *, round_number: int) -> Verdict:
        """Append emitted `ids`, charge the exceptions among them, let the rule learn; returns what was emitted.

        Idempotent: a round that is already committed changes nothing, charges nothing and teaches nothing.
        """
        if round_number != self.round:
            return NOTHING_EMITTED
        emitted = verdict.emitted(len(ids))
        self._buffer[self._length : self._length + len(ids)] = ids
        self._length += len(ids)
        self.ledger = self.ledger.charge(emitted.exceptions)
        self.rule.learn(emitted)
        self.round += 1
        return emitted
