"""What the decode loop needs from models, drafters, verifiers and rules. At most four methods each.

A call always carries the whole sequence: state behind a protocol is a cache, never the truth. The callee keeps
the longest prefix it already has, drops the rest, and catches up by itself; so rollback, retry, preemption and a
restarted process are one and the same path.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serving.requests import GREEDY, Sampling
from serving.session import AcceptanceRule as AcceptanceRule
from serving.session import Session
from serving.types import Draft, DraftLimits, Ids, Passes, ScoreTable, Verified


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Score the last `num_rows` positions of `ids`: row j of S sees ids[: len(ids) - S + 1 + j].

    For verification ids = committed + draft and num_rows = K + 1; for one drafting step num_rows = 1.
    """

    session_id: str
    ids: Ids
    num_rows: int = 1
    sampling: Sampling = GREEDY
    prompt_len: int = 0
    num_logprobs: int | None = None

    @property
    def num_output(self) -> int:
        """Output tokens that the first of the scored rows sees."""
        return len(self.ids) - self.num_rows + 1 - self.prompt_len

    @property
    def draft_ids(self) -> Ids:
        """i32[num_rows - 1], the tokens under judgement."""
        return self.ids[len(self.ids) - self.num_rows + 1 :]


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Propose at most `max_draft` tokens after `ids` (prompt + output so far).

    A drafter with several sources heeds `max_by_source` as well; one that has a single source need not look at it.
    """

    session_id: str
    ids: Ids
    prompt_len: int
    max_draft: int
    salt: str = ""
    sampling: Sampling = GREEDY
    max_by_source: DraftLimits | None = None

    @property
    def cache_limit(self) -> int:
        """The most tokens that a look-up may draft."""
        return self.max_draft if self.max_by_source is None else min(self.max_draft, self.max_by_source.cache)

    @property
    def model_floor(self) -> float:
        """How likely all of a model's draft up to a token must be for that token to be worth its row."""
        return 0.0 if self.max_by_source is None else self.max_by_source.model_floor

    @property
    def model_limit(self) -> int:
        """The most tokens that a model may draft."""
        return self.max_draft if self.max_by_source is None else min(self.max_draft, self.max_by_source.model)


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """A target's features of positions start..start + count - 1, bfloat16 rows as bytes: the one kind of hidden state
    that leaves the process that made it.
    """

    start: int
    count: int
    data: bytes

    @property
    def stop(self) -> int:
        return self.start + self.count


class ReadFeatures(Protocol):
    """What the target knows of the positions of `ids` from `start` on. KeyError without such a session."""

    def __call__(self, session_id: str, ids: Ids, start: int) -> FeatureRows: ...


@dataclass(frozen=True, slots=True)
class Proposal:
    """A session and the draft to be judged for it in the round that the session is in when this is made."""

    session: Session
    draft: Draft
    round_number: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "round_number", self.session.round)

    @property
    def is_settled(self) -> bool:
        """Whether its round is over: nothing that is found out about it counts any more."""
        return self.round_number != self.session.round

    @property
    def score_request(self) -> ScoreRequest:
        """Committed tokens and draft in one row of ids, K + 1 rows to score."""
        return ScoreRequest(
            session_id=self.session.request_id,
            ids=self.session.tokens_with(self.draft.ids),
            num_rows=len(self.draft) + 1,
            sampling=self.session.sampling,
            prompt_len=self.session.prompt_len,
            num_logprobs=self.session.num_logprobs,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a draft: for drafters that learn from it."""

    session_id: str
    draft: Draft
    num_accepted: int


class PendingDrafts(Protocol):
    """Drafts that were started and not awaited."""

    def result(self) -> list[Draft]:
        """One draft a request, in order. Never raises: a drafter that fails drafts nothing."""
        ...


class Drafter(Protocol):
    """Proposes continuations for a whole batch."""

    @property
    def degraded(self) -> bool:
        """True while the drafter is out of reach and drafts nothing."""
        ...

    def start(self, requests: Sequence[DraftRequest]) -> PendingDrafts:
        """Begin drafting for the batch; the loop commits and streams meanwhile."""
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn what was accepted. Local and cheap; anything remote travels with the next start."""
        ...

    def close(self, session_id: str, ids: Ids | None) -> None:
        """Forget a session. `ids` is its whole text if it may be remembered for later requests, else None."""
        ...


class ScoringModel(Protocol):
    """A causal LM with its own KV: target, slim verifier and draft model alike."""

    def open(self, session_id: str, ids: Ids, *, salt: str = "") -> int:
        """Reserve a KV row; returns how many leading tokens of `ids` are already there (a shared prefix)."""
        ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreTable | None]:
        """One pass over the batch. None for a request whose prompt is still being fed, or waits for its turn."""
        ...

    def close(self, session_id: str) -> None:
        """Give the row back. Its content may serve later requests with the same prefix and salt."""
        ...


class RollbackModel(ScoringModel, Protocol):
    """A model whose cache can be told to forget."""

    def rollback(self, session_id: str, length: int) -> None:
        """Hold no more than the first `length` tokens of a session."""
        ...


class RemoteModel(RollbackModel, Protocol):
    """A model in another process. Out of reach it has no tables: whoever asks must do without."""

    @property
    def degraded(self) -> bool:
        """True while it is out of reach."""
        ...


class Verifier(Protocol):
    """Decides a batch of proposals, by whatever models and tiers it is made of."""

    @property
    def degraded(self) -> bool:
        """True while one of its models is out of reach and others do its work."""
        ...

    @property
    def passes(self) -> Passes:
        """Those of the full target, prompts' among them."""
        ...

    def open(self, session: Session) -> int:
        """Make room for a session; returns how many of its tokens need no computing."""
        ...

    def verify(self, proposals: Sequence[Proposal]) -> list[Verified | None]:
        """One entry a proposal; None while a prompt is still being fed (its draft is then dropped)."""
        ...

    def close(self, session_id: str) -> None: ...
