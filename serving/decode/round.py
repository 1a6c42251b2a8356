"""One round of one session: clip what the rule allowed, commit it, keep the receipt."""

from dataclasses import dataclass, replace

from serving.decode.text import TextStream
from serving.decode.tiers import NO_TIERS, TierCounts, count_tiers, with_slim
from serving.protocols import Proposal
from serving.requests import Chunk, Receipt
from serving.rules.clip import Clipped, clip
from serving.types import NOTHING_EMITTED, Draft, FinishReason, Ledger, ScoreTable, TokenLogprob, Verdict, Verified


@dataclass(frozen=True, slots=True)
class Settled:
    """A committed round: what to stream, how many draft tokens were kept, what of the verdict was emitted, by whom."""

    chunk: Chunk
    num_accepted: int
    emitted: Verdict
    tiers: TierCounts

    @property
    def num_gained(self) -> int:
        """Accepted tokens that came on top of the one that plain decoding would have emitted."""
        return min(self.num_accepted, max(0, len(self.chunk.ids) - 1))


def settle(proposal: Proposal, verified: Verified, text: TextStream, *, degraded: bool) -> Settled:
    """Clip and commit one verified proposal. Mutates the session; the ledger is charged for emitted tokens only.

    Idempotent: a proposal whose round is over changes nothing, neither session nor text, and its chunk is empty.
    """
    session, draft = proposal.session, proposal.draft
    if proposal.is_settled:
        nothing = Chunk(session.request_id, (), "", session.receipt, session.ledger)
        return Settled(nothing, 0, NOTHING_EMITTED, NO_TIERS)
    clipped = clip(verified.verdict, draft.ids, limits=session.limits, room=session.room, ends_text=text.push)
    begins_at = session.num_emitted
    emitted = session.commit(clipped.ids, verified.verdict, round_number=proposal.round_number)
    tiers = count_tiers(verified, clipped, draft_ids=draft.ids)
    receipt = updated(session.receipt, draft, clipped=clipped, tiers=tiers, degraded=degraded)
    receipt = charged(receipt, emitted, session.ledger, begins_at=begins_at)
    session.receipt = with_slim(receipt, tiers, num_emitted=len(clipped.ids))
    session.finish_reason = clipped.finish_reason
    chunk = Chunk(
        request_id=session.request_id,
        ids=tuple(clipped.ids.tolist()),
        text=text.finish() if session.is_finished else text.take(),
        receipt=session.receipt,
        ledger=session.ledger,
        finish_reason=session.finish_reason,
        logprobs=_logprobs(verified.full, clipped),
        tiers=emitted.tiers if session.wants_tiers else (),
        exceptions=tuple(replace(one, index=begins_at + one.index) for one in emitted.exceptions),
        seen=tuple((one.draft_id, one.target_id) for one in emitted.seen) if not session.rule.is_lossless else (),
    )
    return Settled(chunk, clipped.num_accepted, emitted, tiers)


def _logprobs(table: ScoreTable | None, clipped: Clipped) -> tuple[TokenLogprob, ...] | None:
    """One entry an emitted token, None where the request did not ask."""
    if table is None or table.logprobs is None:
        return None
    return tuple(
        table.logprobs.of(row, is_draft=row < clipped.num_accepted, token_id=token)
        for row, token in enumerate(clipped.ids.tolist())
    )


def updated(receipt: Receipt, draft: Draft, *, clipped: Clipped, tiers: TierCounts, degraded: bool) -> Receipt:
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
        drafts_empty=receipt.drafts_empty + (num_drafted == 0),
        target_passes=receipt.target_passes + (not tiers.is_slim_only),
        draft_passes=receipt.draft_passes + draft.num_passes,
        replaced=receipt.replaced + tiers.replaced,
        choices=choices,
        degraded=receipt.degraded or degraded,
    )


def charged(receipt: Receipt, emitted: Verdict, ledger: Ledger, *, begins_at: int) -> Receipt:
    """`receipt` after a round whose first token is `begins_at` in the output: what its exceptions cost."""
    if not emitted.exceptions and not emitted.is_exhausted:
        return receipt
    is_first = emitted.is_exhausted and emitted.rejected is not None and receipt.exhausted_at is None
    return replace(
        receipt,
        regret_spent=ledger.regret_spent,
        num_exceptions=receipt.num_exceptions + len(emitted.exceptions),
        rescues=receipt.rescues + sum(one.count > 0 for one in emitted.exceptions),
        exhausted_at=begins_at + emitted.num_accepted if is_first else receipt.exhausted_at,
    )


def ended(
    request_id: str, receipt: Receipt, ledger: Ledger, reason: FinishReason, *, error: str | None = None
) -> Chunk:
    """The last chunk of a request that ends without a verdict: cancelled, or failed."""
    return Chunk(request_id, (), "", receipt, ledger, finish_reason=reason, error=error)
