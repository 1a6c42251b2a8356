"""Who judges each request, and on what terms: the profile's rule, tightened as the request asks."""

from dataclasses import dataclass, field, replace

from serving.config_rules import AsdControls, AsdCsdRule, AsdRule, CsdControls, CsdRule, RuleConfig, StrictRule
from serving.memory.correction import EMPTY_COUNTS, PairCounts, RequestMemory
from serving.memory.growing import name_of
from serving.memory.online import OnlineMemory
from serving.requests import GenerationRequest, Receipt
from serving.rules import asd, asd_csd, csd, strict
from serving.rules.budget import Purse
from serving.rules.terms import budget_of, reason, unbounded
from serving.rules.tighten import rule_for
from serving.session import AcceptanceRule


@dataclass(frozen=True)
class Terms:
    """A request's rule, and its receipt as of its admission."""

    rule: AcceptanceRule
    receipt: Receipt


@dataclass
class RuleBook:
    """Opens and closes requests under one profile's rule. Belongs to one engine, called from its thread.

    `special_ids` are the tokens that leave no trace in a text; `vouched` says what stands behind a lossy rule;
    `frozen` are calibrated counts, and `online` is the memory that learns, if the profile wants one.
    """

    config: RuleConfig = field(default_factory=StrictRule)
    profile_hash: str = ""
    special_ids: frozenset[int] = frozenset()
    vouched: str = "uncertified"
    frozen: PairCounts = EMPTY_COUNTS
    online: OnlineMemory | None = None
    _memories: dict[str, tuple[str, RequestMemory]] = field(default_factory=dict)

    def open(self, request: GenerationRequest) -> Terms:
        """Raises RequestError where the request asks for more than the profile gives."""
        config = rule_for(self.config, request)
        learned = self._learned(config, request.salt)
        receipt = replace(
            request.receipt or Receipt(),
            lossless=config.is_lossless,
            reason=reason(config, vouched=self.vouched, is_adjusted=request.sampling.adjusts_logits),
            profile=self.profile_hash,
            budget=budget_of(config),
            regret_spent=request.ledger.regret_spent,
            memory=self._memory_id(learned) if isinstance(config, CsdControls) else "",
        )
        if receipt.slim is not None and receipt.slim.decided:  # by the replica that died
            receipt = unbounded(receipt)
        return Terms(self._rule(config, request, learned), receipt)

    def close(self, request_id: str) -> None:
        """What a request has met may nominate for later ones, where the memory learns."""
        salt, memory = self._memories.pop(request_id, ("", None))
        if memory is not None and self.online is not None:
            self.online.add(salt, memory.own)

    def _learned(self, config: RuleConfig, salt: str) -> PairCounts:
        """What the tenant's requests have met so far, where the memory learns and the rule asks it."""
        if self.online is None or not isinstance(config, CsdControls):
            return EMPTY_COUNTS
        return self.online.snapshot(salt)

    def _memory_id(self, learned: PairCounts) -> str:
        frozen = self.frozen.fingerprint or "empty"
        return frozen if self.online is None else f"{frozen}+{name_of(learned.seen) or 'empty'}"

    def _rule(self, config: RuleConfig, request: GenerationRequest, learned: PairCounts) -> AcceptanceRule:
        match config:
            case StrictRule():
                return strict.StrictRule()
            case AsdRule():
                return _asd(config, request)
            case CsdRule():
                return self._csd(config, request, learned)
            case AsdCsdRule():
                return asd_csd.AsdCsdRule(_asd(config, request), self._csd(config, request, learned), config.combine)

    def _csd(self, config: CsdControls, request: GenerationRequest, learned: PairCounts) -> csd.CsdRule:
        memory = RequestMemory(self.frozen, learned, resumed=request.resume_seen)
        self._memories[request.request_id] = request.salt, memory
        held_ids = self.special_ids | request.limits.stop_ids
        return csd.CsdRule(memory, config.count_above, config.min_ratio, held_ids)


def _asd(config: AsdControls, request: GenerationRequest) -> asd.AsdRule:
    held_ids = frozenset() if config.relax_stop_tokens else request.limits.stop_ids
    purse = Purse(config.budget, config.max_exceptions)
    return asd.AsdRule(purse, gate=config.gate, q=config.q, q_cap=config.q_cap, held_ids=held_ids)
