"""Models and drafters without weights, for the loop: the next token is a pure function of the text so far."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from serving.decode.grouping import Grouping
from serving.decode.guard import DraftPolicy, FixedDrafts
from serving.decode.limits import SchedulerLimits
from serving.decode.scheduler import Decode, Scheduler
from serving.drafters.ready import ReadyDrafts
from serving.protocols import Drafter, DraftRequest, Outcome, ScoreRequest
from serving.requests import GenerationRequest, Limits
from serving.rules.book import RuleBook
from serving.types import Draft, Ids, ScoreTable, as_ids
from serving.verifiers.full import FullVerifier

NextToken = Callable[[Sequence[int]], int]


def arithmetic(ids: Sequence[int]) -> int:
    """A text without short cycles: each token depends on the last two and on the length."""
    return 3 + (7 * int(ids[-1]) + 3 * int(ids[-2] if len(ids) > 1 else 0) + len(ids)) % 90


@dataclass
class ScriptedModel:
    """ScoringModel whose argmax is `next_token`; `feed_passes` passes are spent on every prompt first."""

    next_token: NextToken
    feed_passes: int = 0
    open_sessions: dict[str, int] = field(default_factory=dict)
    num_passes: int = 0
    rows: list[int] = field(default_factory=list)

    def open(self, session_id: str, ids: Ids, *, salt: str = "") -> int:
        self.open_sessions[session_id] = self.feed_passes
        return 0

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreTable | None]:
        self.num_passes += 1
        self.rows.append(sum(request.num_rows for request in requests))
        return [self._score(request) for request in requests]

    def close(self, session_id: str) -> None:
        del self.open_sessions[session_id]

    def _score(self, request: ScoreRequest) -> ScoreTable | None:
        if self.open_sessions[request.session_id] > 0:
            self.open_sessions[request.session_id] -= 1
            return None
        ids, rows = request.ids.tolist(), request.num_rows
        following = as_ids([self.next_token(ids[: len(ids) - rows + 1 + row]) for row in range(rows)])
        logits = np.ones(rows, dtype=np.float32)
        return ScoreTable(request.draft_ids, following, logits, logits[:-1], following, logits)


@dataclass
class ScriptedDrafter:
    """Drafts `guess` of each request; records what it is told."""

    guess: Callable[[DraftRequest], list[int]]
    degraded: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    closed: dict[str, Ids | None] = field(default_factory=dict)

    def start(self, requests: Sequence[DraftRequest]) -> ReadyDrafts:
        return ReadyDrafts([Draft(as_ids(self.guess(request)), "model") for request in requests])

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes.extend(outcomes)

    def close(self, session_id: str, ids: Ids | None) -> None:
        self.closed[session_id] = None if ids is None else ids.copy()


def oracle(next_token: NextToken, *, right: int = 99) -> ScriptedDrafter:
    """Always right for the first `right` tokens of a draft, then always wrong."""

    def guess(request: DraftRequest) -> list[int]:
        ids, draft = request.ids.tolist(), []
        for position in range(request.max_draft):
            token = next_token([*ids, *draft])
            draft.append(token if position < right else token + 1)
        return draft

    return ScriptedDrafter(guess)


def make_scheduler(
    model: ScriptedModel,
    drafter: Drafter,
    *,
    max_draft: int = 5,
    max_sessions: int = 4,
    max_length: int = 256,
    grouping: Grouping | None = None,
    policy: DraftPolicy | None = None,
    rules: RuleBook | None = None,
    decode: Decode | None = None,
) -> Scheduler:
    return Scheduler(
        verifier=FullVerifier(model),
        drafter=drafter,
        decode=decode or spell,
        limits=SchedulerLimits(max_sessions, max_length, 64, max_draft),
        grouping=grouping or Grouping(shares_cores=True),
        policy=policy or FixedDrafts(max_draft),
        rules=rules,
    )


def spell(ids: Sequence[int]) -> str:
    """One letter a token."""
    return "".join(chr(ord("!") + token) for token in ids)


def request(name: str, *, max_tokens: int = 20, prompt: Sequence[int] = (5, 9), **limits: object) -> GenerationRequest:
    return GenerationRequest(name, as_ids(list(prompt)), Limits(max_tokens, **limits))  # type: ignore[arg-type]


def plain(next_token: NextToken, prompt: Sequence[int], count: int) -> list[int]:
    """What plain decoding emits."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]
