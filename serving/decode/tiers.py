"""What the tiers of a verifier did in one committed round, for receipts and counters."""

from dataclasses import dataclass, replace

from serving.requests import Receipt, SlimReceipt
from serving.rules.clip import Clipped
from serving.types import Verified


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


def count_tiers(verified: Verified, clipped: Clipped, *, num_drafted: int) -> TierCounts:
    """`replaced` is 1 where another token took a drafted one's place."""
    num_emitted, audit = len(clipped.ids), verified.audit
    tiers = verified.verdict.tiers[:num_emitted]
    regrets = audit.regrets[: audit.num_before + num_emitted]
    return TierCounts(
        full_rows=0 if verified.full is None else audit.num_before + num_drafted + 1,
        slim_rows=0 if verified.slim is None else num_drafted + 1,
        slim_accepted=tiers.count("slim"),
        regenerated=tiers.count("regenerated"),
        replaced=int(num_emitted > clipped.num_accepted and clipped.num_accepted < num_drafted),
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
    if slim.accepted + slim.regenerated == 0:
        return replace(receipt, slim=slim)
    return replace(receipt, slim=slim, lossless=False, reason=SLIM_REASON)


SLIM_REASON = "slim tier: some tokens were decided without the target; nothing bounds them, audit_regret is only a log"
