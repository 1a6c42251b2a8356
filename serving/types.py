"""The records that cross layers and processes. Frozen, without tensors.

K drafted tokens, S = K + 1 scored rows. Row i is conditioned on the committed tokens and on draft[:i];
its argmax (or pre-drawn sample) is what the target itself would emit there. Ids are int32, logits float32 in nats.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]
DraftSource: TypeAlias = Literal["none", "suffix", "model", "eagle3", "flexdraft"]
Tier: TypeAlias = Literal["accepted", "exception", "recovered", "bonus", "slim", "regenerated"]

EMPTY_IDS: Ids = np.zeros(0, dtype=np.int32)
EMPTY_IDS.flags.writeable = False


def as_ids(values: Sequence[int] | Ids) -> Ids:
    """`values` as an int32 array; no copy where it is one already."""
    return np.asarray(values, dtype=np.int32)


def common_prefix(a: Ids, b: Ids) -> int:
    """How many leading tokens two texts have in common."""
    shorter = min(len(a), len(b))
    a, b = a[:shorter], b[:shorter]
    if a.tobytes() == b.tobytes():  # nearly always, and cheaper than a search
        return shorter
    same = a == b
    return shorter if same.all() else int(same.argmin())


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for one sequence in one round; K = 0 is legal and means plain decoding.

    `num_passes` counts the passes of the drafter's model that looked for a token of this draft, one that was found too
    doubtful included; a look-up takes none.
    """

    ids: Ids = field(default_factory=lambda: EMPTY_IDS)
    source: DraftSource = "none"
    confidences: Floats | None = None
    num_groups: int = 0
    num_passes: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def clipped(self, max_draft: int) -> "Draft":
        """The first `max_draft` tokens of this draft."""
        if len(self.ids) <= max_draft:
            return self
        confidences = None if self.confidences is None else self.confidences[:max_draft]
        return replace(self, ids=self.ids[:max_draft], confidences=confidences)


EMPTY_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """The most tokens to draft in a round, by what drafting costs: a look-up next to nothing, a model its passes.

    A model ends its draft by `model_floor` as DraftStops has it. `model_rate` is what a round with a draft of the model
    is expected to emit, and `row_price` what each row of a draft costs, both in the tokens that plain decoding emits in
    the same time. As they stand where nothing was measured.
    """

    cache: int
    model: int
    model_floor: float = 0.0
    model_rate: float = 1.0
    row_price: float = 0.0

    @property
    def most(self) -> int:
        """Of any source; 0 asks nobody."""
        return max(self.cache, self.model)


# To think of a token costs a pass, and it is likely by about a half: where those before it are not likelier than so
# many floors, it would as a rule be thought of in vain.
WORTH_A_PASS = 2.0


@dataclass(frozen=True, slots=True)
class DraftStops:
    """Where a model ends the drafts of a batch: after `most` i64[T] tokens, before one less likely than `least`, before
    one that is less likely, together with all before it, than `floors` f32[T], or behind one that is not WORTH_A_PASS.
    """

    most: npt.NDArray[np.int64]
    floors: npt.NDArray[np.float32]
    least: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability (nats) of one emitted token, and the likeliest tokens of its position with theirs, in order.

    Of the model's own distribution: before adjustments and temperature.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log probabilities (nats) of a block before adjustments and temperature: S = K + 1 rows, n likeliest a row."""

    draft: Floats
    next: Floats
    top_ids: npt.NDArray[np.int32]
    top: npt.NDArray[np.float32]

    def drop(self, count: int) -> "RowLogprobs":
        """Without the first `count` rows."""
        return RowLogprobs(self.draft[count:], self.next[count:], self.top_ids[count:], self.top[count:])

    def of(self, row: int, *, is_draft: bool, token_id: int) -> TokenLogprob:
        """The entry of the token emitted on `row`: the draft's own, or the target's."""
        logprob = self.draft[row] if is_draft else self.next[row]
        pairs = zip(self.top_ids[row].tolist(), self.top[row].tolist(), strict=True)
        return TokenLogprob(token_id, float(logprob), tuple(pairs))


@dataclass(frozen=True)
class ScoreTable:
    """The target's view of one block: S = K + 1 rows, the columns that rules read, all after adjustments.

    `next_ids` is what the target emits on each row (argmax, lowest id on ties; or its pre-drawn sample), and
    `next_logits` the logit of it. `logsumexp` and `logprobs` are None where nothing asked for them.
    """

    draft_ids: Ids
    next_ids: Ids
    next_logits: Floats
    draft_logits: Floats
    top_ids: Ids
    top_logits: Floats
    logsumexp: Floats | None = None
    logprobs: RowLogprobs | None = None

    @cached_property  # a rule asks several times for each of these two
    def mismatch(self) -> npt.NDArray[np.bool_]:
        """bool[K]: decided by id, never by equal logits."""
        differs: npt.NDArray[np.bool_] = self.draft_ids != self.next_ids[:-1]
        return differs

    @cached_property
    def regret(self) -> npt.NDArray[np.float64]:
        """float64[K], nats: top logit minus the draft token's, >= 0; +inf where the draft token is impossible."""
        gap = self.top_logits[:-1].astype(np.float64) - self.draft_logits.astype(np.float64)
        return np.maximum(gap, 0.0)

    def drop(self, count: int) -> "ScoreTable":
        """Without the first `count` rows, of at most K."""
        return ScoreTable(
            draft_ids=self.draft_ids[count:],
            next_ids=self.next_ids[count:],
            next_logits=self.next_logits[count:],
            draft_logits=self.draft_logits[count:],
            top_ids=self.top_ids[count:],
            top_logits=self.top_logits[count:],
            logsumexp=None if self.logsumexp is None else self.logsumexp[count:],
            logprobs=None if self.logprobs is None else self.logprobs.drop(count),
        )


@dataclass(frozen=True, slots=True)
class ExceptionRecord:
    """One mismatch that was met: block index, both ids, regret in nats, and the pair's count where a memory has it.

    In a chunk and a receipt `index` is the token's place in the request's output, from 0.
    """

    index: int
    draft_id: int
    target_id: int
    regret: float
    count: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rule's judgement of one block: accept draft[:num_accepted], then emit `next_id` (recovered or bonus).

    `exceptions` are the mismatches that were accepted, `rejected` is the one that ended the block, if any;
    `is_exhausted` says that only the budget stood in its way.
    """

    num_accepted: int
    next_id: int | None
    tiers: tuple[Tier, ...]
    exceptions: tuple[ExceptionRecord, ...] = ()
    rejected: ExceptionRecord | None = None
    is_exhausted: bool = False

    @property
    def seen(self) -> tuple[ExceptionRecord, ...]:
        """Every mismatch that was met, in order."""
        return self.exceptions if self.rejected is None else (*self.exceptions, self.rejected)

    def emitted(self, num_ids: int) -> "Verdict":
        """What of this verdict stands in the first `num_ids` tokens of its block."""
        if num_ids >= len(self.tiers):
            return self
        return replace(
            self,
            num_accepted=min(num_ids, self.num_accepted),
            next_id=self.next_id if num_ids > self.num_accepted else None,
            tiers=self.tiers[:num_ids],
            exceptions=tuple(exception for exception in self.exceptions if exception.index < num_ids),
            rejected=self.rejected if self.rejected is not None and self.rejected.index < num_ids else None,
        )


NOTHING_EMITTED = Verdict(0, None, ())


@dataclass(frozen=True, slots=True)
class Audit:
    """Regret (nats) by the full target's rows of tokens that a slim verifier decided: never charged, only logged.

    First of `num_before` tokens of earlier rounds, then of this block's.
    """

    num_before: int = 0
    regrets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Passes:
    """Passes of a model since it started, each over a whole batch, and their time together."""

    count: int = 0
    seconds: float = 0.0

    def plus(self, seconds: float) -> "Passes":
        """With one more that took so long."""
        return Passes(self.count + 1, self.seconds + seconds)


@dataclass(frozen=True, slots=True)
class Verified:
    """A verdict with the tables it rests on: rows of this block, None for a model that was not asked."""

    verdict: Verdict
    full: ScoreTable | None = None
    slim: ScoreTable | None = None
    audit: Audit = Audit()


@dataclass(frozen=True, slots=True)
class Ledger:
    """Spent regret (float64 nats) and accepted mismatches of one request; travels with it, never refilled."""

    regret_spent: float = 0.0
    num_exceptions: int = 0

    def charge(self, exceptions: Sequence[ExceptionRecord]) -> "Ledger":
        """This ledger after `exceptions`; one running float64 sum, so that replays agree to the last bit."""
        if not exceptions:
            return self
        spent = self.regret_spent
        for exception in exceptions:
            spent += exception.regret
        return Ledger(spent, self.num_exceptions + len(exceptions))


NOTHING_SPENT = Ledger()
