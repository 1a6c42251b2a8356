from pathlib import Path

import numpy as np
import torch

from serving.build import Watch
from serving.decode.grouping import Grouping
from serving.decode.guard import FixedDrafts
from serving.decode.limits import SchedulerLimits
from serving.decode.offline import complete
from serving.decode.scheduler import Scheduler
from serving.drafters.ready import PlainDrafter
from serving.models.hf_decoder import HFDecoder
from serving.models.kv_store import KVStore
from serving.models.packed_lm import HeadOptions, PackedLM
from serving.requests import GenerationRequest, Limits, Sampling
from serving.types import as_ids
from serving.verifiers.full import FullVerifier
from tests.models.test_packed_lm import random_ids
from tests.models.tiny import VOCAB, tiny_model
from tuning.selfgen import Dialogue
from tuning.train_features import FeatureFolder, FeatureSet

LAYERS = (0, 1, 2, 3)


def make_target(seed: int = 0, *, num_rows: int = 1) -> PackedLM:
    decoder = HFDecoder(tiny_model("llama", seed=seed))
    hidden = tiny_model("llama").config.hidden_size
    store = KVStore(decoder.shapes, num_rows, 64, torch.bfloat16, feature_layers=LAYERS, hidden=hidden)
    return PackedLM(decoder, store, head=HeadOptions(VOCAB), prefill_chunk=64)


def read(target: PackedLM, parts: list[list[Dialogue]], folder: FeatureFolder) -> FeatureSet:
    for part in parts:
        if folder.lacks(part):
            folder.read(target, part)
    return folder.all(parts)


def rows(features: FeatureSet, index: int) -> torch.Tensor:
    return torch.cat([features[index].features, features[index].hidden], dim=1)


def expected(dialogue: Dialogue, *, seed: int = 0) -> torch.Tensor:
    return make_target(seed).all_features(dialogue.ids[:-1]).float()


def test_every_dialogue_keeps_its_own_features_and_a_second_run_reads_no_text(tmp_path: Path) -> None:
    dialogues = [Dialogue(random_ids(5, i), random_ids(10 + i % 7, 100 + i)) for i in range(20)]
    parts, folder = [dialogues[:8], dialogues[8:9], dialogues[9:]], FeatureFolder(tmp_path / "here", "tiny", LAYERS)
    assert all(map(folder.lacks, parts))
    first = read(make_target(), parts, folder)
    assert not any(map(folder.lacks, parts))
    for features in (first, FeatureFolder(tmp_path / "here", "tiny", LAYERS).all(parts)):
        assert len(features) == 20
        for index, dialogue in enumerate(dialogues):
            assert torch.equal(rows(features, index), expected(dialogue))
            assert np.array_equal(features[index].ids.numpy(), dialogue.ids)
            assert features[index].num_prompt == 5


def test_some_of_them_in_another_order_are_themselves(tmp_path: Path) -> None:
    dialogues = [Dialogue(random_ids(5, i), random_ids(10, 100 + i)) for i in range(4)]
    some = read(make_target(), [dialogues], FeatureFolder(tmp_path, "tiny", LAYERS)).of([dialogues[3], dialogues[1]])
    assert some.lengths == [15, 15]
    assert torch.equal(rows(some, 0), expected(dialogues[3]))
    assert torch.equal(rows(some, 1), expected(dialogues[1]))


def test_features_of_other_dialogues_or_of_another_target_are_never_taken(tmp_path: Path) -> None:
    dialogues = [Dialogue(random_ids(5, i), random_ids(10, 100 + i)) for i in range(3)]
    for seed, texts in ((0, dialogues), (0, dialogues[::-1]), (1, dialogues)):
        found = read(make_target(seed), [texts], FeatureFolder(tmp_path, f"tiny {seed}", LAYERS))
        for index, dialogue in enumerate(texts):
            assert torch.equal(rows(found, index), expected(dialogue, seed=seed))


def test_texts_of_a_token_have_no_features(tmp_path: Path) -> None:
    dialogues = [Dialogue(random_ids(1, 0), random_ids(0, 0)), Dialogue(random_ids(5, 1), random_ids(3, 2))]
    found = read(make_target(), [dialogues], FeatureFolder(tmp_path, "tiny", LAYERS))
    assert len(rows(found, 0)) == 0
    assert torch.equal(rows(found, 1), expected(dialogues[1]))


def test_a_text_leaves_the_features_it_was_written_with(tmp_path: Path) -> None:
    """What a watched engine hands on, session by session, is what reading the text gives."""
    target, folder = make_target(num_rows=2), FeatureFolder(tmp_path, "tiny", LAYERS)
    scheduler = Scheduler(
        verifier=Watch(LAYERS, folder.take).verifier(FullVerifier(target), target), drafter=PlainDrafter(),
        decode=lambda ids: "".join(chr(token) for token in ids), limits=SchedulerLimits(2, 60, 8, 0),
        grouping=Grouping(shares_cores=True), policy=FixedDrafts(0),
    )  # fmt: skip
    requests = [
        GenerationRequest(str(i), random_ids(4 + i, i), Limits(12 - i, frozenset()), Sampling(0.9 * (i % 2), i))
        for i in range(5)
    ]
    done = {one.request_id: one for one in complete(scheduler, requests)}
    dialogues = [Dialogue(r.prompt_ids, as_ids(done[r.request_id].output_ids)) for r in requests]
    folder.forget("1")
    kept = [0, 2, 3, 4]
    folder.keep([str(i) for i in kept], [dialogues[i] for i in kept])
    found = folder.all([[dialogues[i] for i in kept]])
    for at, index in enumerate(kept):
        torch.testing.assert_close(rows(found, at), expected(dialogues[index]), atol=2e-2, rtol=2e-2)
