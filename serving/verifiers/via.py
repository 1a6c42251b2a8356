"""Three tiers (VIA-SD): a slim verifier, then the full target for what it leaves open, judged by the session's rule.

The full target lags behind what the slim verifier let pass. When it is asked it catches up in one chunk, and its rows
for those tokens are logged as audit regret, never charged.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from serving.protocols import Proposal, RollbackModel, ScoreRequest, ScoringModel
from serving.rules.via import Route, ViaGates, behind, route
from serving.session import Session
from serving.types import Audit, Passes, ScoreTable, Verified


@dataclass(frozen=True)
class _Slim:
    """What the slim tier made of a block, and the rows that it rests on."""

    table: ScoreTable
    route: Route


class ViaVerifier:
    """At most one slim and one full pass a round. A slim verifier without an answer leaves its rounds to the target.

    A block goes straight to the full tier where it is empty, where it might leave more than `max_unverified` tokens
    unseen, and where its request asks for `strict` or for log probabilities, which are the target's.
    """

    def __init__(
        self,
        *,
        slim: RollbackModel,
        full: ScoringModel,
        gates: ViaGates,
        is_degraded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._slim = slim
        self._full = full
        self._gates = gates
        self._is_degraded = is_degraded
        self._seen: dict[str, int] = {}
        self.passes = Passes()

    @property
    def degraded(self) -> bool:
        return self._is_degraded()

    def open(self, session: Session) -> int:
        slim = session.receipt.slim
        self._seen[session.request_id] = len(session) - (0 if slim is None else slim.unseen)
        self._slim.open(session.request_id, session.tokens, salt=session.salt)
        return self._full.open(session.request_id, session.tokens, salt=session.salt)

    def verify(self, proposals: Sequence[Proposal]) -> list[Verified | None]:
        slim = self._score_slim(proposals)
        full = self._score_full([proposal for proposal in proposals if _escalates(slim.get(_id(proposal)))])
        verified = [self._decide(proposal, slim.get(_id(proposal)), full.get(_id(proposal))) for proposal in proposals]
        self._trim_slim(proposals, verified)
        return verified

    def close(self, session_id: str) -> None:
        self._seen.pop(session_id, None)
        self._slim.close(session_id)
        self._full.close(session_id)

    def _score_slim(self, proposals: Sequence[Proposal]) -> dict[str, _Slim]:
        """By session, of those that the slim verifier may judge and has caught up with."""
        eligible = [proposal for proposal in proposals if self._may_be_slim(proposal)]
        tables = self._slim.score([proposal.score_request for proposal in eligible]) if eligible else []
        return {
            _id(proposal): _Slim(table, route(table, self._gates, stop_ids=proposal.session.limits.stop_ids))
            for proposal, table in zip(eligible, tables, strict=True)
            if table is not None
        }

    def _score_full(self, proposals: Sequence[Proposal]) -> dict[str, ScoreTable | None]:
        """By session."""
        if not proposals:
            return {}
        started = time.perf_counter()
        tables = self._full.score([self._full_request(proposal) for proposal in proposals])
        self.passes = self.passes.plus(time.perf_counter() - started)
        return {_id(proposal): table for proposal, table in zip(proposals, tables, strict=True)}

    def _may_be_slim(self, proposal: Proposal) -> bool:
        num_drafted = len(proposal.draft)
        most = self._num_unseen(proposal.session) + num_drafted + self._gates.has_bonus
        session = proposal.session
        is_open = session.num_logprobs is None and not session.is_strict
        return num_drafted > 0 and most <= self._gates.max_unverified and is_open

    def _num_unseen(self, session: Session) -> int:
        """Committed tokens that no full pass has seen."""
        return max(0, len(session) - self._seen[session.request_id])

    def _full_request(self, proposal: Proposal) -> ScoreRequest:
        """The block's rows, and before them one for each of the at most `max_unverified` tokens it has not seen."""
        num_rows = self._num_unseen(proposal.session) + len(proposal.draft) + 1
        return replace(proposal.score_request, num_rows=num_rows)

    def _decide(self, proposal: Proposal, slim: _Slim | None, full: ScoreTable | None) -> Verified | None:
        if slim is not None and slim.route.verdict is not None:
            return Verified(slim.route.verdict, slim=slim.table)
        if full is None:
            return None
        session, num_kept = proposal.session, 0 if slim is None else slim.route.num_kept
        num_unseen = self._num_unseen(session)
        rest = session.rule.judge(full.drop(num_unseen + num_kept), session.ledger)
        verdict = behind(num_kept, rest)
        self._seen[session.request_id] = len(session) + len(verdict.tiers)
        audit = Audit(num_unseen, tuple(full.regret[: num_unseen + num_kept].tolist()))
        return Verified(verdict, full.drop(num_unseen), None if slim is None else slim.table, audit)

    def _trim_slim(self, proposals: Sequence[Proposal], verified: Sequence[Verified | None]) -> None:
        """The last token to be committed has no KV yet; a slim pass may have made some, having judged that token."""
        for proposal, one in zip(proposals, verified, strict=True):
            if one is not None and one.slim is not None:
                self._slim.rollback(_id(proposal), len(proposal.session) + len(one.verdict.tiers) - 1)


def _id(proposal: Proposal) -> str:
    return proposal.session.request_id


def _escalates(slim: _Slim | None) -> bool:
    return slim is None or slim.route.verdict is None
