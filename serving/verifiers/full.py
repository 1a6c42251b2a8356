"""One tier: the full target scores every block, the session's rule judges it."""

import time
from collections.abc import Sequence

from serving.protocols import Proposal, ScoringModel
from serving.session import Session
from serving.types import Passes, Verified


class FullVerifier:
    """Lossless exactly when a session's rule is."""

    degraded = False

    def __init__(self, model: ScoringModel) -> None:
        self._model = model
        self.passes = Passes()

    def open(self, session: Session) -> int:
        return self._model.open(session.request_id, session.tokens, salt=session.salt)

    def verify(self, proposals: Sequence[Proposal]) -> list[Verified | None]:
        started = time.perf_counter()
        tables = self._model.score([proposal.score_request for proposal in proposals])
        self.passes = self.passes.plus(time.perf_counter() - started)
        return [
            None if table is None else Verified(session.rule.judge(table, session.ledger), full=table)
            for session, table in zip((proposal.session for proposal in proposals), tables, strict=True)
        ]

    def close(self, session_id: str) -> None:
        self._model.close(session_id)
