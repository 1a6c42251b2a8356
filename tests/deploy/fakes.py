"""A drafter that remembers what it was told, and a worker that loses, delays or forgets on demand."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from serving.deploy.link import WorkerLostError
from serving.deploy.messages import DraftAnswer, DraftCall
from serving.deploy.table import DraftTable
from serving.protocols import DraftRequest, Outcome
from serving.types import Draft, Ids, as_ids


@dataclass
class Drafts:
    drafts: list[Draft]

    def result(self) -> list[Draft]:
        return self.drafts


@dataclass
class SpyDrafter:
    """Drafts last + 1, last + 2, ...: so a draft shows which ids it was made from."""

    seen: dict[str, list[int]] = field(default_factory=dict)
    requests: list[DraftRequest] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    closed: list[tuple[str, list[int] | None]] = field(default_factory=list)
    degraded: bool = False

    def start(self, requests: Sequence[DraftRequest]) -> Drafts:
        self.requests.extend(requests)
        self.seen.update((r.session_id, r.ids.tolist()) for r in requests)
        return Drafts([Draft(as_ids(range(r.ids[-1] + 1, r.ids[-1] + 1 + r.max_draft)), "model") for r in requests])

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes.extend(outcomes)

    def close(self, session_id: str, ids: Ids | None) -> None:
        self.seen.pop(session_id, None)
        self.closed.append((session_id, None if ids is None else ids.tolist()))


class DirectReply:
    def __init__(self, worker: "DirectWorker", answer: DraftAnswer | None) -> None:
        self._worker = worker
        self._answer = answer

    def result(self, timeout_s: float) -> DraftAnswer:
        if self._answer is None or self._worker.is_dead:
            raise WorkerLostError
        if self._worker.hangs:
            raise TimeoutError
        return self._answer


class DirectWorker:
    """A worker in this process. While `hangs`, calls are applied but their answers are late."""

    def __init__(self, incarnation: str = "one") -> None:
        self.drafter = SpyDrafter()
        self.table = DraftTable(self.drafter, incarnation)
        self.calls: list[DraftCall] = []
        self.hangs = False
        self.is_dead = False

    def send(self, call: DraftCall) -> DirectReply:
        self.calls.append(call)
        return DirectReply(self, None if self.is_dead else self.table.handle(call))
