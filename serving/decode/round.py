"""One round of one session: clip what the rule allowed, commit it, keep the receipt."""

from dataclasses import dataclass, replace

from serving.decode.text import TextStream
from serving.protocols import Proposal
from serving.rules.clip import Clipped, clip
from serving.types import Chunk, Draft, FinishReason, Ledger, Receipt, ScoreTable, TokenLogprob, Verified


@dataclass(frozen=True, slots=True)
class Settled:
    """A committed round: what to stream, and how many draft tokens were kept."""

    chunk: Chunk
    num_accepted: int


def settle(proposal: Proposal, verified: Verified, text: TextStream, *, degraded: bool) -> Settled:
    """Clip and commit one verified proposal. Mutates the session; the ledger is charged for emitted tokens only."""
    session, draft = proposal.session, proposal.draft
    clipped = clip(verified.verdict, draft.ids, limits=session.limits, room=session.room, ends_text=text.push)
    session.commit(clipped.ids, verified.verdict, round_number=session.round)
    session.receipt = updated(session.receipt, draft, clipped=clipped, degraded=degraded)
    session.finish_reason = clipped.finish_reason
    chunk = Chunk(
        request_id=session.request_id,
        ids=tuple(clipped.ids.tolist()),
        text=text.finish() if session.is_finished else text.take(),
        receipt=session.receipt,
        ledger=session.ledger,
        finish_reason=session.finish_reason,
        logprobs=_logprobs(verified.full, clipped),
    )
    return Settled(chunk, clipped.num_accepted)


def _logprobs(table: ScoreTable | None, clipped: Clipped) -> tuple[TokenLogprob, ...] | None:
    """One entry an emitted token, None where the request did not ask."""
    if table is None or table.logprobs is None:
        return None
    return tuple(
        table.logprobs.of(row, is_draft=row < clipped.num_accepted, token_id=token)
        for row, token in enumerate(clipped.ids.tolist())
    )


def updated(receipt: Receipt, draft: Draft, *, clipped: Clipped, degraded: bool) -> Receipt:
    """`receipt` after one more round. The bonus and the recovered token count as emitted, never as accepted."""
    num_drafted, choices = len(draft), receipt.choices
    if num_drafted:
        choices = {**choices, draft.source: choices.get(draft.source, 0) + 1}
    return replace(
        receipt,
        rounds=receipt.rounds + 1,
        drafted=receipt.drafted + num_drafted,
        accepted=receipt.accepted + clipped.num_accepted,
        emitted=receipt.emitted + len(clipped.ids),
        target_passes=receipt.target_passes + 1,
        drafts_empty=receipt.drafts_empty + (num_drafted == 0),
        choices=choices,
        degraded=receipt.degraded or degraded,
    )


def ended(
    request_id: str, receipt: Receipt, reason: FinishReason, *, error: str | None = None, ledger: Ledger | None = None
) -> Chunk:
    """The last chunk of a request that ends without a verdict: cancelled, or failed."""
    return Chunk(request_id, (), "", receipt, ledger or Ledger(), finish_reason=reason, error=error)
