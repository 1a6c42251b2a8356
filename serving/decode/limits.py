"""What one engine takes on, checked before a request is queued."""

from dataclasses import dataclass, field

from serving.config_rules import RuleConfig, StrictRule
from serving.errors import RequestError
from serving.requests import GenerationRequest
from serving.rules.tighten import rule_for


@dataclass(frozen=True)
class SchedulerLimits:
    """Sequences at once, tokens of one sequence, requests that may wait, and the profile's K and rule.

    `greedy_only` names what else of the profile has no meaning for sampled requests, if anything.
    """

    max_sessions: int
    max_length: int
    max_queued: int
    max_draft: int
    rule: RuleConfig = field(default_factory=StrictRule)
    greedy_only: str | None = None

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError, naming the field, for a request that can never be served."""
        prompt_len, max_tokens = len(request.prompt_ids), request.limits.max_tokens
        if prompt_len == 0:
            raise RequestError("prompt", "must hold at least one token")
        if max_tokens < 1:
            raise RequestError("max_tokens", f"must be at least 1, got {max_tokens}")
        is_loose = self.greedy_only is not None and not request.is_strict
        if is_loose and not request.sampling.is_greedy:
            raise RequestError(
                "temperature",
                f"must be 0 with {self.greedy_only}, which compares tokens with the likeliest one, got "
                f'{request.sampling.temperature:g}; or send speculation {{"mode": "strict"}}',
            )
        if prompt_len + max_tokens > self.max_length:
            raise RequestError(
                "max_tokens",
                f"prompt ({prompt_len} tokens) + max_tokens ({max_tokens}) = {prompt_len + max_tokens} exceeds "
                f"the {self.max_length} tokens a sequence may have; shorten one of them",
            )
        rule_for(self.rule, request)
