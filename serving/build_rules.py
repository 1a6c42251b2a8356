"""From a profile to the rule that judges its requests, with the counts that it was calibrated to."""

import hashlib
from pathlib import Path

from serving.config import (
    DrafterConfig,
    Eagle3Drafter,
    HybridDrafter,
    ModelDrafter,
    Profile,
    RuleChooser,
    YieldChooser,
)
from serving.config_rules import CsdControls
from serving.drafters.yield_predictor import YieldPredictor
from serving.memory.correction import EMPTY_COUNTS
from serving.memory.correction_file import load_counts
from serving.memory.online import OnlineMemory
from serving.models.digest import model_digest
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
    return hashlib.sha256(f"{tokenizer.fingerprint}\0{models_identity(profile)}".encode()).hexdigest()[:16]


def models_identity(profile: Profile) -> str:
    """Target and drafter by content, as one line, with the settings that decide which tokens are drafted.

    Raises ModelError or ConfigError for a model or predictor that cannot be found.
    """
    return f"{model_digest(profile.target.model)} {_drafted_by(profile.drafter)}"


def _drafted_by(drafter: DrafterConfig) -> str:
    match drafter:
        case ModelDrafter() | Eagle3Drafter():
            return f"{drafter.kind} {model_digest(drafter.model)}"
        case HybridDrafter():
            return f"{_drafted_by(drafter.cache)} {_drafted_by(drafter.model)} {_chosen_by(drafter.chooser)}"
        case _:
            return drafter.model_dump_json(exclude={"max_draft"})


def _chosen_by(chooser: YieldChooser | RuleChooser) -> str:
    if isinstance(chooser, RuleChooser):
        return chooser.model_dump_json()
    return f"{chooser.kind} {chooser.tau!r} {YieldPredictor.load(chooser.predictor).digest}"
