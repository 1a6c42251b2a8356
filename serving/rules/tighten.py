"""What a request may take away from a profile's rule: budgets fall, gates close, nothing opens."""

from serving.config_rules import AsdControls, RuleConfig, StrictRule
from serving.errors import RequestError
from serving.requests import GenerationRequest, Tightening

_CONTROLS = ("budget", "gate", "max_exceptions")


def rule_for(rule: RuleConfig, request: GenerationRequest) -> RuleConfig:
    """The rule that judges `request`. Raises RequestError for what would loosen it, does not apply, or samples."""
    tightened = _tightened(rule, request.tightening)
    if request.is_strict:
        return StrictRule()
    if not tightened.is_lossless and not request.sampling.is_greedy:
        raise RequestError(
            "temperature",
            f"is {request.sampling.temperature:g}, but rule {rule.kind!r} of this profile is for greedy decoding only, "
            "for it measures from the likeliest token; send temperature 0, or speculation "
            '{"mode": "strict"}, which is lossless at any temperature',
        )
    return tightened


def _tightened(rule: RuleConfig, asked: Tightening) -> RuleConfig:
    values = {name: getattr(asked, name) for name in _CONTROLS if getattr(asked, name) is not None}
    for name, value in values.items():
        if not isinstance(rule, AsdControls):
            raise RequestError(
                f"speculation.{name}",
                f"has no effect under rule {rule.kind!r} of this profile; leave it out"
                + ("" if rule.is_lossless else ', or send {"mode": "strict"}'),
            )
        if value > getattr(rule, name):
            raise RequestError(
                f"speculation.{name}",
                f"is {value:g}, but a request may only lower the profile's {getattr(rule, name):g}",
            )
    return rule.model_copy(update=values) if values else rule
