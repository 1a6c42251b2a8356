"""Distillation on a toy: it learns what a target says, resumes to the same weights, and its export loads."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from serving.models.draft_lm import is_draft_lm, load_draft_model
from serving.types import as_ids
from tests.models.tiny import tiny_model
from tuning.labels import hard_labels, label
from tuning.selfgen import Dialogue, read_dialogues, write_dialogues
from tuning.train_drafter import DrafterRecipe, Progress, draft_vocabulary, export, new_student, train
from tuning.train_loop import Checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(path)
    return str(path)


def counting(number: int) -> Dialogue:
    """Text in which every token follows from the one before."""
    start = 3 + number % 40
    ids = [(start + 5 * i) % 60 + 3 for i in range(30)]
    return Dialogue(as_ids(ids[:6]), as_ids(ids[6:]))


@pytest.fixture
def recipe(base: str) -> DrafterRecipe:
    return DrafterRecipe(
        base=base,
        layers=(0, 2),
        vocab_size=70,
        epochs=6,
        tokens_per_batch=300,
        learning_rate=3e-3,
        steps_per_checkpoint=5,
    )


def run(recipe: DrafterRecipe, checkpoint: Path, *, stop_at: int | None = None) -> tuple[object, list[Progress]]:
    data = [(dialogue, hard_labels(dialogue)) for dialogue in map(counting, range(40))]
    target_ids = draft_vocabulary([d for d, _ in data], size=recipe.vocab_size, target_size=199)
    torch.manual_seed(0)
    student, seen = new_student(recipe, target_ids), []

    def on_step(progress: Progress) -> None:
        seen.append(progress)
        if progress.step == stop_at:
            raise KeyboardInterrupt

    train(student, recipe, target_ids, data, checkpoint=Checkpoint(checkpoint, {}), on_step=on_step)
    export(student, recipe, target_ids, checkpoint.parent / "out", card={"note": "toy"})
    return student, seen


def test_it_learns_the_text_and_its_export_is_a_draft_model(recipe: DrafterRecipe, tmp_path: Path) -> None:
    _, seen = run(recipe, tmp_path / "checkpoint.pt")
    assert seen[-1].agreement > 0.9
    folder = tmp_path / "out"
    assert is_draft_lm(str(folder))
    assert json.loads((folder / "draft.json").read_text())["recipe"]["layers"] == [0, 2]
    draft = load_draft_model(str(folder), torch.float32)
    ids = counting(7).output_ids
    logits = draft.network(torch.from_numpy(ids[None].astype(np.int64))).logits[0]
    predicted = draft.id_map[logits.argmax(dim=-1)]
    assert (predicted[4:-1].numpy() == ids[5:]).mean() > 0.9


def test_a_killed_training_resumes_to_the_same_end(recipe: DrafterRecipe, tmp_path: Path) -> None:
    whole, _ = run(recipe, tmp_path / "whole.pt")
    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "cut.pt", stop_at=8)
    resumed, seen = run(recipe, tmp_path / "cut.pt")
    assert seen[0].step == 6
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):  # type: ignore[attr-defined]
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


class Echo:
    """A teacher that expects every token again, plus `shift`."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift
        self.calls = 0

    def top_logprobs(self, ids: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
        self.calls += 1
        return np.tile(ids[:, None] + self.shift, (1, top)), np.zeros((len(ids), top), dtype=np.float16)


def test_dialogues_survive_the_disk(tmp_path: Path) -> None:
    dialogues = [counting(i) for i in range(3)]
    write_dialogues(tmp_path / "part.parquet", dialogues)
    back = read_dialogues([tmp_path / "part.parquet"])
    assert [d.ids.tolist() for d in back] == [d.ids.tolist() for d in dialogues]


def labelled(teacher: Echo, dialogues: list[Dialogue], folder: Path, *, key: str = "echo") -> list[list[int]]:
    found = label(teacher, dialogues, folder, teacher_key=key, on_dialogues=lambda _: None)
    return [entry.ids[:, 0].tolist() for entry in found]


def test_labels_survive_the_disk(tmp_path: Path) -> None:
    dialogues, teacher = [counting(i) for i in range(3)], Echo()
    for _ in range(2):  # the second time from the disk
        assert labelled(teacher, dialogues, tmp_path) == [d.ids.tolist() for d in dialogues]
    assert teacher.calls == 3


def test_labels_of_other_dialogues_or_of_another_teacher_are_never_taken(tmp_path: Path) -> None:
    dialogues = [counting(i) for i in range(3)]
    labelled(Echo(), dialogues, tmp_path)
    backwards = dialogues[::-1]
    assert labelled(Echo(), backwards, tmp_path) == [d.ids.tolist() for d in backwards]
    assert labelled(Echo(1), dialogues, tmp_path, key="other") == [(d.ids + 1).tolist() for d in dialogues]
