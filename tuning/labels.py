"""What a drafter is to predict at every position: the target's own distribution, or just the token that came next."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from serving.types import Ids
from tuning.selfgen import Dialogue, text_key

TOP = 24
_PART = 64


@dataclass(frozen=True)
class SoftLabels:
    """For n positions of one dialogue: ids i32[n, TOP] and log-probabilities f16[n, TOP] of the next token."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float16]


def hard_labels(dialogue: Dialogue) -> SoftLabels:
    """The next token with all the weight: on greedy answers that is the target's argmax, at no cost."""
    ids = np.append(dialogue.ids[1:], 0).astype(np.int32)[:, None]
    logprobs = np.zeros(ids.shape, dtype=np.float16)
    logprobs[-1] = -np.inf  # nothing follows the last token
    return SoftLabels(ids, logprobs)


class Teacher(Protocol):
    """A model that tells its likeliest next tokens after every position of a text."""

    def top_logprobs(self, ids: Ids, top: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]: ...


def label(
    teacher: Teacher,
    dialogues: list[Dialogue],
    folder: Path,
    *,
    teacher_key: str,
    on_dialogues: Callable[[int], None],
) -> list[SoftLabels]:
    """Labels of all `dialogues`, in order; kept in `folder` in parts, so that a killed run resumes.

    A part is named by its text and `teacher_key`, which tells the teacher from all others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    labels: list[SoftLabels] = []
    for start in range(0, len(dialogues), _PART):
        batch = dialogues[start : start + _PART]
        path = folder / f"labels-{text_key(batch, teacher_key)}.npz"
        if not path.is_file():
            _write(path, [SoftLabels(*teacher.top_logprobs(dialogue.ids, TOP)) for dialogue in batch])
        labels += _read(path)
        on_dialogues(len(batch))
    return labels


def _write(path: Path, labels: list[SoftLabels]) -> None:
    partial = path.with_suffix(".partial.npz")
    np.savez(
        partial,
        lengths=np.array([len(entry.ids) for entry in labels]),
        ids=np.concatenate([entry.ids for entry in labels]),
        logprobs=np.concatenate([entry.logprobs for entry in labels]),
    )
    partial.replace(path)


def _read(path: Path) -> list[SoftLabels]:
    with np.load(path) as parts:
        ends = np.cumsum(parts["lengths"])[:-1]
        pairs = zip(np.split(parts["ids"], ends), np.split(parts["logprobs"], ends), strict=True)
        return [SoftLabels(ids, logprobs) for ids, logprobs in pairs]
