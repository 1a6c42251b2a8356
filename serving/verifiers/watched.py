"""A verifier that tells of every session that ends while it still has its rows: for jobs that learn from them."""

from collections.abc import Callable, Sequence

from serving.protocols import Proposal, Verifier
from serving.session import Session
from serving.types import Passes, Verified


class WatchedVerifier:
    """Decides as `inner` does."""

    def __init__(self, inner: Verifier, on_end: Callable[[Session], None]) -> None:
        self._inner = inner
        self._on_end = on_end
        self._sessions: dict[str, Session] = {}

    @property
    def degraded(self) -> bool:
        return self._inner.degraded

    @property
    def passes(self) -> Passes:
        return self._inner.passes

    def open(self, session: Session) -> int:
        self._sessions[session.request_id] = session
        return self._inner.open(session)

    def verify(self, proposals: Sequence[Proposal]) -> list[Verified | None]:
        return self._inner.verify(proposals)

    def close(self, session_id: str) -> None:
        self._on_end(self._sessions.pop(session_id))
        self._inner.close(session_id)
