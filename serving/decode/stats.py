"""Counters of one engine since it started."""

import copy
import math
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

from serving.decode.tiers import TierCounts
from serving.memory.drift import NUM_BINS, bin_of
from serving.types import Draft, DraftSource, Verdict, Verified

Snapshot: TypeAlias = dict[str, float | list[int] | dict[DraftSource, int]]


@dataclass
class EngineStats:
    """Sums over all requests. accepted excludes bonus and recovered tokens, so accepted <= drafted always.

    `num_drafts` are proposals with K > 0, `drafts_empty` those with none; `accepted_at[i]` counts the drafts whose
    token i was kept, `drafts_by` those of each source. `draft_wait_s` is the engine thread's time in drafters,
    `verify_s` its time in the verifier, of which the full target's `forwards`, each over a batch, took `forward_s`.
    `target_passes` counts a pass once for each session in it, as receipts do; `slim_passes` and `slim_rows` are a slim
    verifier's. `replaced` are drafted tokens whose place another one took,
    `audit_regret` is in nats. Of lossy rules: accepted mismatches (exceptions), those whose pair a memory knew
    (rescues), their regret in nats, and blocks that ended for want of budget. `first_mismatches` counts
    greedy blocks of the target alone by the regret at which strict would have ended them (`memory.drift`).
    `draft_limit` is no sum: the mean K that sessions were allowed in the last round.
    """

    rounds: int = 0
    target_passes: int = 0
    target_rows: int = 0
    slim_passes: int = 0
    slim_rows: int = 0
    slim_accepted: int = 0
    regenerated: int = 0
    replaced: int = 0
    audited: int = 0
    audit_regret: float = 0.0
    num_drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    drafts_empty: int = 0
    prompt_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    exceptions: int = 0
    rescues: int = 0
    regret_spent: float = 0.0
    exhausted: int = 0
    draft_wait_s: float = 0.0
    verify_s: float = 0.0
    forwards: int = 0
    forward_s: float = 0.0
    draft_limit: float = 0.0
    accepted_at: list[int] = field(default_factory=list)
    drafts_by: dict[DraftSource, int] = field(default_factory=dict)
    first_mismatches: list[int] = field(default_factory=lambda: [0] * NUM_BINS)

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted, within 0..1; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def count_draft(self, draft: Draft, *, num_accepted: int, num_emitted: int) -> None:
        """One settled proposal."""
        num_drafted = len(draft)
        if num_drafted:
            self.drafts_by[draft.source] = self.drafts_by.get(draft.source, 0) + 1
        self.num_drafts += num_drafted > 0
        self.drafted += num_drafted  # before what was accepted: a copy made in between still has accepted <= drafted
        self.accepted += num_accepted
        self.emitted += num_emitted
        self.drafts_empty += num_drafted == 0
        self.accepted_at.extend([0] * (num_accepted - len(self.accepted_at)))
        for position in range(num_accepted):
            self.accepted_at[position] += 1

    def count_mismatches(self, judged: Verified, emitted: Verdict, *, is_greedy: bool) -> None:
        """One settled proposal: what strict would have refused first, and what was accepted all the same.

        The histogram has what calibration counts: emitted and finite; greedy, for a sample differs by chance; and of
        blocks that the target judged alone, for what a slim verifier hands on is what it finds hard.
        """
        if is_greedy and judged.slim is None and emitted.seen and math.isfinite(emitted.seen[0].regret):
            self.first_mismatches[bin_of(emitted.seen[0].regret)] += 1
        self.exceptions += len(emitted.exceptions)
        self.rescues += sum(one.count > 0 for one in emitted.exceptions)
        self.regret_spent += sum(one.regret for one in emitted.exceptions)
        self.exhausted += judged.verdict.is_exhausted

    def count_tiers(self, counts: TierCounts) -> None:
        """By whom the same proposal was decided."""
        self.target_passes += counts.full_rows > 0
        self.target_rows += counts.full_rows
        self.slim_passes += counts.slim_rows > 0
        self.slim_rows += counts.slim_rows
        self.slim_accepted += counts.slim_accepted
        self.regenerated += counts.regenerated
        self.replaced += counts.replaced
        self.audited += counts.audited
        self.audit_regret += counts.audit_regret

    def copy(self) -> "EngineStats":
        """As of now. Any thread may ask: half a round may be in it, but never more accepted than drafted."""
        copied = copy.copy(self)
        copied.accepted_at = list(self.accepted_at)
        copied.drafts_by = dict(self.drafts_by)
        copied.first_mismatches = list(self.first_mismatches)
        return copied

    def snapshot(self) -> Snapshot:
        """A copy as plain numbers, with the acceptance rate."""
        return {**asdict(self), "acceptance_rate": self.acceptance_rate}
