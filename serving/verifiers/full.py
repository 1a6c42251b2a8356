"""One tier: the full target scores every block, one rule judges it."""

from collections.abc import Sequence

from serving.protocols import AcceptanceRule, Proposal, ScoringModel
from serving.session import Session
from serving.types import Verified


class FullVerifier:
    """Lossless exactly when its rule is."""

    degraded = False

    def __init__(self, model: ScoringModel, rule: AcceptanceRule) -> None:
        self._model = model
        self._rule = rule

    def open(self, session: Session) -> int:
        return self._model.open(session.request_id, session.tokens, salt=session.salt)

    def verify(self, proposals: Sequence[Proposal]) -> list[Verified | None]:
        tables = self._model.score([proposal.score_request for proposal in proposals])
        return [
            None if table is None else Verified(self._rule.judge(table, proposal.session.ledger), full=table)
            for proposal, table in zip(proposals, tables, strict=True)
        ]

    def close(self, session_id: str) -> None:
        self._model.close(session_id)
