"""What a correction memory belongs to."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from serving.build_rules import build_rules, memory_identity
from serving.config import (
    DrafterConfig,
    HybridDrafter,
    ModelConfig,
    ModelDrafter,
    Profile,
    RuleChooser,
    SuffixDrafter,
    YieldChooser,
    load_profile,
)
from serving.models.source import ASSETS_DIR
from serving.models.tokenizer import ChatTokenizer

TOKENIZER = cast(ChatTokenizer, SimpleNamespace(fingerprint="f00d", special_ids=frozenset()))
SHIPPED = "smollm2-135m-drafter"


def identity(drafter: DrafterConfig, target: str = "smollm2-135m-instruct") -> str:
    return memory_identity(Profile(name="a", target=ModelConfig(model=target), drafter=drafter), TOKENIZER)


def test_settings_that_change_no_drafted_token_leave_a_table_its_profile() -> None:
    by_name = identity(ModelDrafter())
    assert by_name == identity(ModelDrafter(model=str(ASSETS_DIR / SHIPPED)))
    assert by_name == identity(ModelDrafter(max_draft=2, min_confidence=0.5, coupled=False))
    assert identity(SuffixDrafter()) == identity(SuffixDrafter(max_draft=3))
    assert identity(HybridDrafter()) == identity(HybridDrafter(cache=SuffixDrafter(max_draft=2)))


def test_another_drafter_or_target_has_another_identity(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = {
        identity(ModelDrafter()),
        identity(ModelDrafter(), target=str(tmp_path)),
        identity(ModelDrafter(model=str(tmp_path))),
        identity(SuffixDrafter()),
        identity(SuffixDrafter(max_depth=8)),
        identity(HybridDrafter()),
        identity(HybridDrafter(chooser=RuleChooser())),
        identity(HybridDrafter(chooser=YieldChooser(tau=1.0))),
        identity(HybridDrafter(model=ModelDrafter(model=str(tmp_path)))),
    }
    assert len(found) == 9


def test_a_retrained_drafter_voids_a_table(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "draft.json").write_text(json.dumps({"base": "smollm2-135m-instruct"}))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"first")
    before = identity(ModelDrafter(model=str(tmp_path)))
    weights.write_bytes(b"other")
    os.utime(weights, ns=(1, 1))
    assert identity(ModelDrafter(model=str(tmp_path))) != before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["csd", "asd-csd"])
def test_the_shipped_table_belongs_to_the_shipped_profiles(name: str) -> None:
    profile = load_profile(name)
    assert len(build_rules(profile, ChatTokenizer.load(profile.target.model)).frozen) == 6262
