"""The words of a receipt: what bounds a request's exceptions, and what does not."""

from dataclasses import replace

from serving.config_rules import AsdControls, AsdCsdRule, AsdRule, CsdRule, RuleConfig, StrictRule
from serving.requests import Receipt

_SLIM = "slim tier: some tokens were decided without the target; nothing bounds them, audit_regret is only a log"


def reason(rule: RuleConfig, *, vouched: str, is_adjusted: bool = False) -> str:
    """Why an answer under `rule` is lossless, or how far it may be from the target's own; `vouched`: by whom.

    Where bias or penalties adjust the logits (`is_adjusted`), the target's own is the likeliest token after them.
    """
    if rule.is_lossless and rule.kind != "strict":
        return f"rule {rule.kind} with nothing to accept is strict, full tier: every token is the target's own"
    match rule:
        case StrictRule():
            return Receipt().reason
        case AsdRule():
            bound = f"the regret of this answer adds up to at most {rule.budget:g} nats"
        case CsdRule():
            bound = (
                f"each exception has at least {rule.min_ratio:g} of the target token's probability, their sum no bound"
            )
        case AsdCsdRule():
            bound = f"the regret of this answer adds up to at most {rule.budget:g} nats, {rule.combine!r} of both tests"
    basis = "; measured on the target's distribution as the request adjusts it" if is_adjusted else ""
    return f"rule {rule.kind}: {bound}{basis}; {vouched}"


def unbounded(receipt: Receipt) -> Receipt:
    """`receipt`, as its rule words it, once a slim verifier has decided a token."""
    words = _SLIM if receipt.lossless else f"{_SLIM}; of what the target decided, {receipt.reason}"
    return replace(receipt, lossless=False, budget=None, reason=words)


def budget_of(rule: RuleConfig) -> float | None:
    """Nats that a request may spend in all; None where nothing bounds their sum."""
    if rule.is_lossless:
        return 0.0
    return rule.budget if isinstance(rule, AsdControls) else None
