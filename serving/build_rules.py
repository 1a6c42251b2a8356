"""From a profile to the rule that judges its requests, with the counts that it was calibrated to."""

import hashlib
from pathlib import Path

from serving.config import Profile
from serving.config_rules import CsdControls
from serving.memory.correction import EMPTY_COUNTS
from serving.memory.correction_file import load_counts
from serving.memory.online import OnlineMemory
from serving.models.tokenizer import ChatTokenizer
from serving.rules.book import RuleBook


def build_rules(profile: Profile, tokenizer: ChatTokenizer) -> RuleBook:
    """The rule of `profile` with its calibrated counts. Raises ConfigError where those are not for this profile."""
    rule, frozen, online = profile.rule, EMPTY_COUNTS, None
    if isinstance(rule, CsdControls):
        if rule.table is not None and rule.table_hash is not None:
            frozen = load_counts(
                Path(rule.table), identity=memory_identity(profile, tokenizer), fingerprint=rule.table_hash
            )
        if rule.memory == "online":
            online = OnlineMemory(max_pairs=rule.max_pairs)
    return RuleBook(
        rule,
        profile_hash=profile.hash,
        special_ids=tokenizer.special_ids,
        frozen=frozen,
        online=online,
    )


def memory_identity(profile: Profile, tokenizer: ChatTokenizer) -> str:
    """What a correction memory belongs to: its pairs mean nothing under another tokenizer, target or drafter."""
    drafter = profile.drafter.model_dump_json(exclude={"max_draft"})
    parts = (tokenizer.fingerprint, profile.target.model, drafter)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
