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
        num_cached = self._inner.open(session)
        self._sessions[session.request_id] = session
        return num_cached

    def verify(self, proposals: Sequence[Proposal]) -> list[Verified | None]:
        return self._inner.verify(proposals)

    def close(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)  # none where its rows could not be had
        if session is not None:
            self._on_end(session)
        self._inner.close(session_id)
