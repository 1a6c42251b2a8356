"""The records that cross layers and processes. Frozen, without tensors.

K drafted tokens, S = K + 1 scored rows. Row i is conditioned on the committed tokens and on draft[:i];
its argmax (or pre-drawn sample) is what the target itself would emit there. Ids are int32, logits float32 in nats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]
DraftSource: TypeAlias = Literal["none", "suffix", "model", "eagle3", "flexdraft"]
Tier: TypeAlias = Literal["accepted", "exception", "recovered", "bonus", "slim", "regenerated"]

# Below it sampling is greedy: logits divided by less leave the range of float32.
LEAST_TEMPERATURE = 1e-5

EMPTY_IDS: Ids = np.zeros(0, dtype=np.int32)
EMPTY_IDS.flags.writeable = False


def as_ids(values: Sequence[int] | Ids) -> Ids:
    """`values` as an int32 array; no copy where it is one already."""
    return np.asarray(values, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for one sequence in one round; K = 0 is legal and means plain decoding."""

    ids: Ids = field(default_factory=lambda: EMPTY_IDS)
    source: DraftSource = "none"
    confidences: Floats | None = None
    num_groups: int = 0

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
    """The most tokens to draft in a round, by what drafting costs: a look-up next to nothing, a model its passes."""

    cache: int
    model: int

    @property
    def most(self) -> int:
        """Of any source; 0 asks nobody."""
        return max(self.cache, self.model)


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


@dataclass(frozen=True, slots=True)
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

    @property
    def mismatch(self) -> npt.NDArray[np.bool_]:
        """bool[K]: decided by id, never by equal logits."""
        differs: npt.NDArray[np.bool_] = self.draft_ids != self.next_ids[:-1]
        return differs

    @property
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
        spent = self.regret_spent
        for exception in exceptions:
            spent += exception.regret
        return Ledger(spent, self.num_exceptions + len(exceptions))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is picked from the target's logits; the defaults change nothing and are greedy.

    Logits are adjusted first: `logit_bias` adds nats to tokens, the penalties count output tokens so far as OpenAI
    does, and `held_ids` are impossible until `min_tokens` tokens are out. Then temperature 0 takes the argmax;
    otherwise logits are divided by it, what `top_k` (0: all), `top_p` or `min_p` exclude is dropped, and the token is
    drawn by noise that is a function of (seed, position, token id) alone.
    """

    temperature: float = 0.0
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    held_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits change before anything is picked."""
        return self.has_penalties or bool(self.logit_bias) or (self.min_tokens > 0 and bool(self.held_ids))


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Tightening:
    """What a request takes away from its profile's rule; None leaves a control as it is."""

    is_strict: bool = False
    budget: float | None = None
    gate: float | None = None
    max_exceptions: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends a request: at most `max_tokens` new tokens, any stop id (kept in the ids), any stop string (cut).

    No stop, id or string, ends a request before it has `min_tokens` new tokens.
    """

    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. `resume_ids` are output ids already delivered by a replica that died, `resume_seen` the
    divergences (draft id, target id) among them.

    `num_logprobs` asks for the log probability of every emitted token and of the so many likeliest beside it,
    `wants_tiers` for the tier of every token. `received_s` is when the gateway got it, in Unix time.
    """

    request_id: str
    prompt_ids: Ids
    limits: Limits
    sampling: Sampling = GREEDY
    max_draft: int | None = None
    num_logprobs: int | None = None
    salt: str = ""
    tightening: Tightening = Tightening()
    wants_tiers: bool = False
    resume_ids: Ids = field(default_factory=lambda: EMPTY_IDS)
    resume_seen: tuple[tuple[int, int], ...] = ()
    ledger: Ledger = Ledger()
    receipt: "Receipt | None" = None
    received_s: float | None = None


@dataclass(frozen=True, slots=True)
class SlimReceipt:
    """What a slim verifier did for one request: tokens it kept (tier A) and wrote itself (tier B), and its passes.

    `audited` of those tokens were later scored by the full target, `audit_regret` nats in all; `unseen` are the last
    ones, which no full pass has seen.
    """

    accepted: int = 0
    regenerated: int = 0
    passes: int = 0
    audited: int = 0
    audit_regret: float = 0.0
    unseen: int = 0


@dataclass(frozen=True, slots=True)
class Receipt:
    """What speculation did for one request: counts of tokens and passes so far, and whether the text is exact.

    accepted excludes the recovered and the bonus token of each round; emitted counts every new token; replaced are
    drafted tokens whose place another one took; cached_tokens are prompt tokens whose KV was there already; choices
    counts the drafts of each source. Of a lossy rule: the budget (None: nothing bounds the sum) and the regret spent in
    nats, exceptions, those among them whose pair a memory knew (rescues), and the output token at which the budget
    first stood in the way. `profile` and `memory` name the profile and the counts as of the admission.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    replaced: int = 0
    target_passes: int = 0
    drafts_empty: int = 0
    cached_tokens: int = 0
    resumed: int = 0
    choices: Mapping[DraftSource, int] = field(default_factory=dict)
    degraded: bool = False
    lossless: bool = True
    reason: str = "strict rule, full tier: every token is the target's own"
    budget: float | None = 0.0
    regret_spent: float = 0.0
    num_exceptions: int = 0
    rescues: int = 0
    exhausted_at: int | None = None
    profile: str = ""
    memory: str = ""
    slim: SlimReceipt | None = None

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted, 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def rejection_rate(self) -> float:
        """replaced / drafted, 0 where nothing was drafted."""
        return self.replaced / self.drafted if self.drafted else 0.0

    @property
    def regret_left(self) -> float | None:
        """Nats that may still be spent; None where nothing bounds their sum."""
        return None if self.budget is None else max(0.0, self.budget - self.regret_spent)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round adds to one request's stream. `text` may lag `ids` while a character or stop is undecided.

    Each chunk carries the whole state a fresh replica needs to go on: ids so far are the receiver's to keep,
    the ledger and the receipt are as of this round. `logprobs` and `tiers` have one entry an id where the request
    asked for them. `exceptions` and `seen`, the divergences (draft id, target id), are this chunk's only.
    """

    request_id: str
    ids: tuple[int, ...]
    text: str
    receipt: Receipt
    ledger: Ledger = Ledger()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    tiers: tuple[Tier, ...] = ()
    exceptions: tuple[ExceptionRecord, ...] = ()
    seen: tuple[tuple[int, int], ...] = ()
    error: str | None = None
