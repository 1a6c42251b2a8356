"""Drafts that are there already: what in-process drafters return from `start`."""

from collections.abc import Sequence
from dataclasses import dataclass

from serving.protocols import DraftRequest, Outcome
from serving.types import EMPTY_DRAFT, Draft, Ids


@dataclass(frozen=True)
class ReadyDrafts:
    """A PendingDrafts that pends no longer."""

    drafts: list[Draft]

    def result(self) -> list[Draft]:
        return self.drafts


class PlainDrafter:
    """Drafts nothing, so every round is plain decoding."""

    degraded = False

    def start(self, requests: Sequence[DraftRequest]) -> ReadyDrafts:
        return ReadyDrafts([EMPTY_DRAFT] * len(requests))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""

    def close(self, session_id: str, ids: Ids | None) -> None:
        """Nothing to forget."""
