from pathlib import Path

import numpy as np
import torch

from serving.models.hf_decoder import HFDecoder
from serving.models.kv_store import KVStore
from serving.models.packed_lm import HeadOptions, PackedLM
from tests.models.test_packed_lm import random_ids
from tests.models.tiny import VOCAB, tiny_model
from tuning.selfgen import Dialogue
from tuning.train_features import FeatureSet, read_features

LAYERS = (0, 1, 2, 3)


def make_target(seed: int = 0) -> PackedLM:
    decoder = HFDecoder(tiny_model("llama", seed=seed))
    hidden = tiny_model("llama").config.hidden_size
    store = KVStore(decoder.shapes, 1, 64, torch.bfloat16, feature_layers=LAYERS, hidden=hidden)
    return PackedLM(decoder, store, head=HeadOptions(VOCAB), prefill_chunk=64)


def read(target: PackedLM, dialogues: list[Dialogue], folder: Path, *, key: str = "tiny") -> FeatureSet:
    return read_features(target, dialogues, folder, target_key=key, on_dialogues=lambda _: None)


def test_every_dialogue_keeps_its_own_features_and_a_second_run_reads_no_text(tmp_path: Path) -> None:
    dialogues = [Dialogue(random_ids(5, i), random_ids(10 + i % 7, 100 + i)) for i in range(70)]
    first = read(make_target(), dialogues, tmp_path)
    again = read(None, dialogues, tmp_path)  # type: ignore[arg-type]
    for features in (first, again):
        assert isinstance(features, FeatureSet)
        assert len(features) == 70
        for index in (0, 1, 63, 64, 69):
            example, ids = features[index], dialogues[index].ids
            expected = make_target().all_features(ids).float()
            assert torch.equal(torch.cat([example.features, example.hidden], dim=1), expected)
            assert np.array_equal(example.ids.numpy(), ids)
            assert example.num_prompt == 5


def test_features_of_other_dialogues_or_of_another_target_are_never_taken(tmp_path: Path) -> None:
    dialogues = [Dialogue(random_ids(5, i), random_ids(10, 100 + i)) for i in range(3)]
    for seed, texts in ((0, dialogues), (0, dialogues[::-1]), (1, dialogues)):
        found = read(make_target(seed), texts, tmp_path, key=f"tiny {seed}")
        for index, dialogue in enumerate(texts):
            expected = make_target(seed).all_features(dialogue.ids).float()
            assert torch.equal(torch.cat([found[index].features, found[index].hidden], dim=1), expected)
