"""What the tiers of a verifier did in one committed round, for receipts and counters."""

from dataclasses import dataclass, replace

from serving.requests import Receipt, SlimReceipt
from serving.rules.clip import Clipped
from serving.rules.terms import unbounded
from serving.types import Ids, Verified


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Of one round of one session; tokens are emitted ones, `audit_regret` is in nats."""

    full_rows: int = 0
    slim_rows: int = 0
    slim_accepted: int = 0
    regenerated: int = 0
    replaced: int = 0
    audited: int = 0
    audit_regret: float = 0.0

    @property
    def is_slim_only(self) -> bool:
        return self.full_rows == 0


NO_TIERS = TierCounts()


def count_tiers(verified: Verified, clipped: Clipped, *, draft_ids: Ids) -> TierCounts:
    """`replaced` is 1 where another token took a drafted one's place."""
    num_emitted, num_drafted, audit = len(clipped.ids), len(draft_ids), verified.audit
    place = clipped.num_accepted
    is_replaced = place < min(num_emitted, num_drafted) and clipped.ids[place] != draft_ids[place]
    tiers = verified.verdict.tiers[:num_emitted]
    regrets = audit.regrets[: audit.num_before + num_emitted]
    return TierCounts(
        full_rows=0 if verified.full is None else audit.num_before + num_drafted + 1,
        slim_rows=0 if verified.slim is None else num_drafted + 1,
        slim_accepted=tiers.count("slim"),
        regenerated=tiers.count("regenerated"),
        replaced=int(is_replaced),
        audited=len(regrets),
        audit_regret=sum(regrets),
    )


def with_slim(receipt: Receipt, counts: TierCounts, *, num_emitted: int) -> Receipt:
    """`receipt` after a round with `counts`: what the slim tier did, if there is one."""
    if receipt.slim is None and counts.slim_rows == 0:
        return receipt
    before = receipt.slim or SlimReceipt()
    slim = SlimReceipt(
        accepted=before.accepted + counts.slim_accepted,
        regenerated=before.regenerated + counts.regenerated,
        passes=before.passes + (counts.slim_rows > 0),
        audited=before.audited + counts.audited,
        audit_regret=before.audit_regret + counts.audit_regret,
        unseen=before.unseen + num_emitted if counts.is_slim_only else 0,
    )
    after = replace(receipt, slim=slim)
    return unbounded(after) if slim.decided and not before.decided else after
