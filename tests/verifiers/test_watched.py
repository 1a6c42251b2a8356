"""A watched verifier decides as the one behind it does, and tells of a session's end while that still has its rows."""

from dataclasses import dataclass, field

import pytest

from serving.protocols import Proposal
from serving.requests import GenerationRequest, Limits
from serving.rules.strict import StrictRule
from serving.session import Session
from serving.types import EMPTY_DRAFT, Draft, Ids, as_ids
from serving.verifiers.full import FullVerifier
from serving.verifiers.watched import WatchedVerifier
from tests.decode.scripted import ScriptedModel, arithmetic


@dataclass
class Ends:
    """What `on_end` was told, and whether the model still had the session's rows then."""

    model: ScriptedModel = field(default_factory=lambda: ScriptedModel(arithmetic))
    told: list[tuple[str, bool]] = field(default_factory=list)

    def __call__(self, session: Session) -> None:
        self.told.append((session.request_id, session.request_id in self.model.open_sessions))


def make_session(name: str) -> Session:
    request = GenerationRequest(name, as_ids([5, 6]), Limits(max_tokens=8))
    return Session.admit(request, StrictRule(), max_draft=4)


def test_it_decides_as_the_one_behind_it_does() -> None:
    ends = Ends()
    watched, inner = WatchedVerifier(FullVerifier(ends.model), ends), FullVerifier(ScriptedModel(arithmetic))
    session = make_session("a")
    right = arithmetic([5, 6])
    for verifier in (watched, inner):
        assert verifier.open(session) == 0
    for draft in (EMPTY_DRAFT, Draft(as_ids([right, 2]), "model"), Draft(as_ids([2]), "model")):
        proposals = [Proposal(session, draft)]
        [ours], [theirs] = watched.verify(proposals), inner.verify(proposals)
        assert ours is not None
        assert theirs is not None
        assert ours.verdict == theirs.verdict
    assert watched.passes.count == inner.passes.count == 3
    assert not watched.degraded


def test_an_end_is_told_once_and_before_the_rows_are_gone() -> None:
    ends = Ends()
    watched = WatchedVerifier(FullVerifier(ends.model), ends)
    for name in "ab":
        watched.open(make_session(name))
    watched.close("b")
    assert ends.told == [("b", True)]
    assert list(ends.model.open_sessions) == ["a"]


class FullModel(ScriptedModel):
    """Has no row for anybody."""

    def open(self, session_id: str, ids: Ids, *, salt: str = "") -> int:
        raise KeyError(session_id)

    def close(self, session_id: str) -> None:
        """As a model's store: nothing to give back."""


def test_a_session_that_got_no_rows_has_no_end_to_tell() -> None:
    ends = Ends(FullModel(arithmetic))
    watched = WatchedVerifier(FullVerifier(ends.model), ends)
    with pytest.raises(KeyError):
        watched.open(make_session("a"))
    watched.close("a")
    assert ends.told == []
