"""What a drafted token takes, measured at start-up through the drafter's own protocol."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from serving.build import drafting_s
from serving.drafters.hybrid import HybridDrafter
from serving.drafters.model import ModelDrafter
from serving.drafters.ready import ReadyDrafts
from serving.drafters.suffix import SuffixDrafter
from serving.memory.suffix import SuffixCache
from serving.models.eagle3_lm import Eagle3LM
from serving.models.eagle3_runner import TorchEagle3, kv_shape
from serving.models.kv_store import KVStore
from serving.protocols import DraftRequest, Outcome
from serving.types import Draft, Ids
from tests.decode.scripted import ScriptedModel, arithmetic
from tests.models.eagle_heads import HIDDEN, tiny_head
from tests.models.test_eagle3 import KnownFeatures

ASK_S, STEP_S, READ_S = 0.004, 0.002, 0.1


@dataclass
class Slow:
    """A model drafter that takes its time for a session's text and for each token."""

    read: set[str] = field(default_factory=set)
    closed: list[str] = field(default_factory=list)
    degraded: bool = False

    def start(self, requests: Sequence[DraftRequest]) -> ReadyDrafts:
        (asked,) = requests
        time.sleep(READ_S * (asked.session_id not in self.read) + ASK_S + STEP_S * asked.max_draft)
        self.read.add(asked.session_id)
        ids = np.full(asked.max_draft, 7, dtype=np.int32)
        return ReadyDrafts([Draft(ids, "model", num_passes=asked.max_draft)])

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        pass

    def close(self, session_id: str, ids: Ids | None) -> None:
        self.closed.append(session_id)


class First:
    """A chooser that would always take the cache."""

    def takes_cache(self, choices: Sequence[object]) -> list[bool]:
        return [True] * len(choices)


def suffix() -> SuffixDrafter:
    return SuffixDrafter(SuffixCache(max_depth=8, max_draft=8, factor=1.0, offset=0.0, min_prob=0.1, max_tokens=1000))


def test_a_step_is_measured_without_the_reading_and_nothing_stays_open() -> None:
    drafter, target = Slow(), ScriptedModel(arithmetic)
    ask_s, token_s = drafting_s(drafter, target, max_draft=4)
    assert STEP_S / 2 <= token_s < READ_S / 4
    assert ASK_S / 2 <= ask_s < READ_S / 4
    assert drafter.closed == ["measure"]
    assert target.open_sessions == {}


def test_of_a_hybrid_it_is_the_model_s() -> None:
    hybrid = HybridDrafter(suffix(), Slow(), First(), model_max_draft=4)
    assert sum(drafting_s(hybrid, ScriptedModel(arithmetic), max_draft=4)) >= STEP_S


def test_a_head_over_the_target_s_features_is_measured_like_any_model() -> None:
    head = tiny_head()
    store = KVStore([kv_shape(head)], 1, 32, torch.float32)
    lm = Eagle3LM(
        TorchEagle3(head, max_length=32), store, KnownFeatures(), target_ids=head.target_ids, hidden=HIDDEN,
        prefill_chunk=16,
    )  # fmt: skip
    drafter = ModelDrafter(lm, max_length=8, source="eagle3")
    assert sum(drafting_s(drafter, ScriptedModel(arithmetic), max_draft=4)) > 0.0
    assert drafter.num_sessions == 0


def test_a_look_up_takes_nothing() -> None:
    assert drafting_s(suffix(), ScriptedModel(arithmetic), max_draft=8) == (0.0, 0.0)
