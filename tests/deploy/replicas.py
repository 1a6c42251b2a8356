"""Replicas that die on cue: a real scheduler over a target whose output is a fixed text, one byte a token."""

from collections.abc import AsyncGenerator, Sequence

from ray.exceptions import ActorDiedError

from serving.decode.grouping import Grouping
from serving.decode.guard import FixedDrafts
from serving.decode.limits import SchedulerLimits
from serving.decode.scheduler import Scheduler
from serving.protocols import DraftRequest, Outcome, Proposal
from serving.requests import Chunk, GenerationRequest, Limits
from serving.session import Session
from serving.types import Draft, ExceptionRecord, Ids, Passes, Verdict, Verified, as_ids
from tests.deploy.fakes import Drafts

PROMPT_LEN = 3


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


class TextVerifier:
    """Emits the bytes of `text`. Each accepted draft token costs one nat, to watch the ledger by."""

    def __init__(self, text: str) -> None:
        self._ids = list(text.encode())

    degraded = False
    passes = Passes()

    def open(self, session: Session) -> int:
        return 0

    def close(self, session_id: str) -> None: ...

    def verify(self, proposals: Sequence[Proposal]) -> list[Verified | None]:
        return [self._judge(proposal) for proposal in proposals]

    def _judge(self, proposal: Proposal) -> Verified:
        at, num_drafted = proposal.session.num_emitted, len(proposal.draft)
        exceptions = tuple(ExceptionRecord(i, 0, 0, regret=1.0) for i in range(num_drafted))
        tiers = ("exception",) * num_drafted + ("bonus",)
        return Verified(Verdict(num_drafted, self._ids[at + num_drafted], tiers, exceptions))


class TextDrafter:
    """Knows the text too, and drafts `block` bytes of it."""

    degraded = False

    def __init__(self, text: str, block: int) -> None:
        self._ids = list(text.encode())
        self._block = block

    def start(self, requests: Sequence[DraftRequest]) -> Drafts:
        return Drafts([self._draft(r) for r in requests])

    def _draft(self, request: DraftRequest) -> Draft:
        at = len(request.ids) - request.prompt_len
        return Draft(as_ids(self._ids[at : at + min(self._block, request.max_draft)]), "model")

    def observe(self, outcomes: Sequence[Outcome]) -> None: ...

    def close(self, session_id: str, ids: Ids | None) -> None: ...


def request(text: str, *, stops: tuple[str, ...] = (), name: str = "r") -> GenerationRequest:
    limits = Limits(max_tokens=len(text.encode()), stop_strings=stops)
    return GenerationRequest(name, as_ids([1] * PROMPT_LEN), limits)


def chunks_of(resumed: GenerationRequest, text: str, block: int) -> list[Chunk]:
    """All that one replica would stream for this request."""
    limits = SchedulerLimits(max_sessions=1, max_length=100_000, max_queued=1, max_draft=64)
    scheduler = Scheduler(
        verifier=TextVerifier(text + "\0"),
        drafter=TextDrafter(text, block),
        decode=decode,
        limits=limits,
        grouping=Grouping(shares_cores=True),
        policy=FixedDrafts(8),
    )
    chunks: list[Chunk] = []
    scheduler.submit(resumed, chunks.append)
    while scheduler.has_work:
        scheduler.step()
    return chunks


class Replicas:
    """Each call is served by the next replica; replica i dies after `lives[i]` chunks, later ones live."""

    def __init__(self, text: str, block: int, lives: Sequence[int]) -> None:
        self._text = text
        self._block = block
        self._lives = list(lives)
        self.requests: list[GenerationRequest] = []
        self.num_closed = 0

    async def __call__(self, resumed: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        number = len(self.requests)
        self.requests.append(resumed)
        chunks = chunks_of(resumed, self._text, self._block)
        life = self._lives[number] if number < len(self._lives) else len(chunks)
        try:
            for chunk in chunks[:life]:
                yield chunk
            if life < len(chunks):
                raise ActorDiedError
        finally:
            self.num_closed += 1
