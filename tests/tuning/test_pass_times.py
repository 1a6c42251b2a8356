"""What passes of a profile cost here: with every drafter, however short its sequences may be."""

import json
from pathlib import Path
from typing import Any

import pytest

from serving.config import (
    Eagle3Drafter,
    EngineConfig,
    HybridDrafter,
    ModelConfig,
    ModelDrafter,
    Profile,
    RuleChooser,
    SuffixDrafter,
    ViaVerifier,
)
from tests.models.eagle_heads import TARGET_HIDDEN, tiny_head, write_head
from tests.models.toy import save_toy
from tuning.via import pass_times

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_LAYERS = 8
ROWS = (1, 5, 32)


def profile(folder: Path, kind: str, *, max_length: int) -> Profile:
    target = save_toy(folder / "target", num_hidden_layers=NUM_LAYERS, hidden_size=TARGET_HIDDEN)
    write_head(tiny_head(), folder / "head")
    mask = folder / "mask.json"
    mask.write_text(json.dumps({"model": target, "num_layers": NUM_LAYERS, "kept": [0, 2, 7]}))
    eagle3 = Eagle3Drafter(model=str(folder / "head"))
    drafters: dict[str, Any] = {
        "suffix": SuffixDrafter(max_draft=4),
        "model": ModelDrafter(model=target),
        "eagle3": eagle3,
        "hybrid": HybridDrafter(cache=SuffixDrafter(max_draft=4), model=eagle3, chooser=RuleChooser()),
    }
    return Profile(
        name="toy",
        target=ModelConfig(model=target, dtype="float32"),
        drafter=drafters[kind],
        verifier=ViaVerifier(mask=str(mask)),
        engine=EngineConfig(max_sessions=1, max_length=max_length),
    )


@pytest.mark.parametrize(
    ("kind", "max_length"), [("suffix", 64), ("model", 158), ("eagle3", 64), ("eagle3", 200), ("hybrid", 200)]
)
def test_passes_are_timed_with_any_drafter_and_any_length(tmp_path: Path, kind: str, max_length: int) -> None:
    times = pass_times(profile(tmp_path, kind, max_length=max_length), ROWS)
    assert list(times.full) == list(times.slim) == list(ROWS)
    assert all(seconds > 0.0 for seconds in (*times.full.values(), *times.slim.values(), times.draft_s))
