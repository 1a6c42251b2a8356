"""Every metric that a Target exports: name, kind and meaning. Units are in the names. No Ray.

Where the meaning is vLLM's, so is the name. Ray has given up ':' in names, so `vllm:x` is `vllm_x`, as it is for vLLM
itself on Ray. Ray puts `ray_` before each name, and Prometheus' suffixes behind: `_total` on counters; `_bucket`,
`_sum` and `_count` on histograms.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

# vLLM's buckets, so that its dashboards compare; those of a token begin lower, for a round may give several.
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """One metric. `label` is what it has besides those of Serve and Ray; histograms have bucket boundaries."""

    name: str
    kind: Kind
    description: str
    label: str | None = None
    boundaries: tuple[float, ...] = ()

    @property
    def exported(self) -> tuple[str, ...]:
        """The names of its series as Prometheus scrapes them."""
        suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
        return tuple(f"ray_{self.name}{suffix}" for suffix in suffixes[self.kind])


NUM_DRAFTS = Metric("vllm_spec_decode_num_drafts", "counter", "drafts with at least one token")
NUM_DRAFT_TOKENS = Metric("vllm_spec_decode_num_draft_tokens", "counter", "drafted tokens")
NUM_ACCEPTED_TOKENS = Metric(
    "vllm_spec_decode_num_accepted_tokens", "counter", "drafted tokens that were kept; the target's own never count"
)
NUM_ACCEPTED_AT = Metric(
    "vllm_spec_decode_num_accepted_tokens_per_pos", "counter", "drafts whose token at `position` was kept", "position"
)
DRAFTS_BY_SOURCE = Metric(
    "drafthouse_drafts_by_source", "counter", "drafts with at least one token, by who made them", "source"
)
NUM_RUNNING = Metric("vllm_num_requests_running", "gauge", "requests in the batch")
NUM_WAITING = Metric("vllm_num_requests_waiting", "gauge", "requests that wait for a place in the batch")
PROMPT_TOKENS = Metric("vllm_prompt_tokens", "counter", "prompt tokens of admitted requests")
GENERATION_TOKENS = Metric("vllm_generation_tokens", "counter", "emitted tokens")
REQUEST_SUCCESS = Metric(
    "vllm_request_success", "counter", "ended requests by reason: stop, length, abort, error", "finished_reason"
)
FIRST_TOKEN_S = Metric(
    "vllm_time_to_first_token_seconds",
    "histogram",
    "from the gateway's receipt to the first token",
    boundaries=_FIRST_TOKEN_S,
)
TOKEN_S = Metric(
    "vllm_request_time_per_output_token_seconds",
    "histogram",
    "a complete request's mean time a token after the first",
    boundaries=_TOKEN_S,
)
REQUEST_S = Metric(
    "vllm_e2e_request_latency_seconds",
    "histogram",
    "from the gateway's receipt to the end of a complete request",
    boundaries=_REQUEST_S,
)

FIRST_TOKEN_PART_S = Metric(
    "drafthouse_time_to_first_token_part_seconds",
    "histogram",
    "time to the first token by where it went: ingress (receipt to submission), queue, draft (the engine's time in "
    "drafters), verify (the rest, mostly prefill)",
    "part",
    _FIRST_TOKEN_S,
)
ACCEPTANCE_RATE = Metric(
    "drafthouse_draft_acceptance_rate", "gauge", "accepted / drafted tokens of the last minute, 0..1"
)
ACCEPTED_LENGTH = Metric("drafthouse_accepted_length", "gauge", "accepted tokens a draft, of the last minute")
DRAFTS_EMPTY = Metric("drafthouse_drafts_empty", "counter", "blocks without a draft: plain decoding")
ROUNDS = Metric("drafthouse_rounds", "counter", "rounds of the batch")
TARGET_PASSES = Metric("drafthouse_target_passes", "counter", "blocks that the target scored, one a session and round")
TARGET_ROWS = Metric("drafthouse_target_rows", "counter", "positions scored to verify drafts, K + 1 a block")
REPLACED_TOKENS = Metric("drafthouse_replaced_tokens", "counter", "drafted tokens whose place another one took")
REJECTION_RATE = Metric("drafthouse_rejection_rate", "gauge", "replaced / drafted tokens of the last minute, 0..1")
SLIM_PASSES = Metric("drafthouse_slim_passes", "counter", "blocks that a slim verifier scored, one a session and round")
SLIM_ACCEPTED = Metric("drafthouse_slim_accepted_tokens", "counter", "tier A: drafted tokens that it kept")
REGENERATED = Metric("drafthouse_regenerated_tokens", "counter", "tier B: tokens that it wrote itself")
SLIM_SHARE = Metric(
    "drafthouse_slim_share", "gauge", "tokens of tiers A and B / emitted ones, of the last minute, 0..1"
)
AUDIT_REGRET = Metric(
    "drafthouse_audit_regret_nats", "gauge", "the target's regret of such a token, mean of the last minute; only logged"
)
FORWARD_MS = Metric(
    "drafthouse_forward_milliseconds", "gauge", "a pass of the full target over the batch, mean of the last minute"
)
HOP_MS = Metric(
    "drafthouse_hop_milliseconds",
    "gauge",
    "a call of a remote drafter less its own time, mean of the last minute; calls that the target did not wait for "
    "are left out",
)
SLIM_HOP_MS = Metric(
    "drafthouse_slim_hop_milliseconds",
    "gauge",
    "a call of a remote slim verifier less its own time, mean of the last minute",
)
DRAFT_MS = Metric(
    "drafthouse_draft_milliseconds", "gauge", "a remote drafter's own time in the same calls, mean of the last minute"
)
DEGRADED = Metric(
    "drafthouse_degraded", "gauge", "1 while the drafter or the slim verifier is out of reach and done without, else 0"
)
SPECULATION_K = Metric(
    "drafthouse_speculation_k", "gauge", "K in use: tokens that a draft may have, mean over sessions"
)
CANCELLED = Metric("drafthouse_requests_cancelled", "counter", "requests that were cancelled")
FAILED = Metric("drafthouse_requests_failed", "counter", "requests that ended with an error")
QUEUE_LIMIT = Metric("drafthouse_queue_limit", "gauge", "requests that may wait before one is refused")
STALLED_S = Metric("drafthouse_stalled_seconds", "gauge", "time since the last round while there is work, else 0")

EXCEPTIONS = Metric(
    "drafthouse_exceptions", "counter", "accepted tokens that are not the target's own choice (lossy rules)", "profile"
)
RESCUES = Metric("drafthouse_rescues", "counter", "exceptions whose pair the correction memory knew", "profile")
REGRET = Metric("drafthouse_regret_nats", "counter", "regret of the exceptions, in nats", "profile")
EXHAUSTED = Metric("drafthouse_budget_exhausted", "counter", "blocks that ended for want of budget alone", "profile")
FIRST_MISMATCHES = Metric(
    "drafthouse_first_mismatches",
    "counter",
    "blocks by the `regret` at which strict would have ended them; none a slim verifier saw",
    "regret",
)
DRIFT = Metric(
    "drafthouse_calibration_drift",
    "gauge",
    "how far the regret of the latest first mismatches is from the profile's calibration: 0 like it, 1 nothing alike",
)

METRICS = (
    NUM_DRAFTS, NUM_DRAFT_TOKENS, NUM_ACCEPTED_TOKENS, NUM_ACCEPTED_AT, DRAFTS_BY_SOURCE, NUM_RUNNING, NUM_WAITING,
    PROMPT_TOKENS, GENERATION_TOKENS, REQUEST_SUCCESS, FIRST_TOKEN_S, TOKEN_S, REQUEST_S, FIRST_TOKEN_PART_S,
    ACCEPTANCE_RATE, ACCEPTED_LENGTH, DRAFTS_EMPTY, ROUNDS, TARGET_PASSES, TARGET_ROWS, REPLACED_TOKENS, REJECTION_RATE,
    SLIM_PASSES, SLIM_ACCEPTED, REGENERATED, SLIM_SHARE, AUDIT_REGRET, FORWARD_MS, HOP_MS, SLIM_HOP_MS, DRAFT_MS,
    DEGRADED, SPECULATION_K, CANCELLED, FAILED, QUEUE_LIMIT, STALLED_S, EXCEPTIONS, RESCUES, REGRET, EXHAUSTED,
    FIRST_MISMATCHES, DRIFT,
)  # fmt: skip
