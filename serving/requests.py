"""What is asked of the engine and what it answers, as it crosses layers and processes. Frozen, without tensors."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from serving.types import (
    EMPTY_IDS,
    NOTHING_SPENT,
    DraftSource,
    ExceptionRecord,
    FinishReason,
    Ids,
    Ledger,
    Tier,
    TokenLogprob,
)

# Below it sampling is greedy: logits divided by less leave the range of float32.
LEAST_TEMPERATURE = 1e-5


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
    `wants_tiers` for the tier of every token. `received_s` is when the gateway got it, in Unix time. The text
    of a request that `continues_prompt` goes on in mid-sentence, as a raw completion does; else it begins anew, as a
    turn of a chat does, without the space that some tokenizers put before a word.
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
    ledger: Ledger = NOTHING_SPENT
    receipt: "Receipt | None" = None
    received_s: float | None = None
    continues_prompt: bool = False

    @property
    def is_resumed(self) -> bool:
        """Whether another replica had it before, be it without a token to show for it."""
        return self.receipt is not None and self.receipt.resumed > 0

    @property
    def is_strict(self) -> bool:
        """Whether every token must be the target's own: as the request asks, or because nothing is drafted."""
        return self.tightening.is_strict or self.max_draft == 0


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

    @property
    def decided(self) -> int:
        """Tokens of both tiers: decided without the target."""
        return self.accepted + self.regenerated


# What a receipt says of exceptions and of what they were judged by: nothing that concerns a lossless answer.
_LOSSY_FIELDS = (
    "budget", "regret_spent", "regret_left", "num_exceptions", "rescues", "exhausted_at", "profile", "memory",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Receipt:
    """What speculation did for one request: counts of tokens and passes so far, and whether the text is exact.

    accepted excludes the recovered and the bonus token of each round; emitted counts every new token; replaced are
    drafted tokens whose place another one took; draft_passes are those of a draft model or head, one a drafted token,
    for drafts that were verified (a pass that only reads text is in no count); cached_tokens are prompt tokens whose KV
    was there already; choices counts the drafts of each source. Of a lossy rule: the budget (None: nothing bounds the
    sum, as of any answer with a slim verifier's tokens) and the regret spent in nats, exceptions, those among them
    whose pair a memory knew (rescues), and the output token at which the budget first stood in the way. Regret is of
    the target's distribution as the request adjusts it, log probabilities are the model's own. `profile` and `memory`
    name the profile and the counts as of the admission.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    replaced: int = 0
    target_passes: int = 0
    draft_passes: int = 0
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
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def rejection_rate(self) -> float:
        """replaced / drafted, 0 where nothing was drafted."""
        return self.replaced / self.drafted if self.drafted else 0.0

    @property
    def regret_left(self) -> float | None:
        """Nats that may still be spent; None where nothing bounds their sum."""
        return None if self.budget is None else max(0.0, self.budget - self.regret_spent)

    @property
    def shown(self) -> dict[str, Any]:
        """What a user is told, by name: of exceptions only where there may be some, of a slim verifier where one is."""
        told = asdict(self) | {"acceptance_rate": self.acceptance_rate, "regret_left": self.regret_left}
        left_out = (*(_LOSSY_FIELDS if self.lossless else ()), *(("slim",) if self.slim is None else ()))
        return {name: value for name, value in told.items() if name not in left_out}


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
    ledger: Ledger = NOTHING_SPENT
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    tiers: tuple[Tier, ...] = ()
    exceptions: tuple[ExceptionRecord, ...] = ()
    seen: tuple[tuple[int, int], ...] = ()
    error: str | None = None
