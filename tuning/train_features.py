"""What an EAGLE-3 head learns from: the target's features and last hidden state at every position of its own text.

F = 3 Ht features and Ht numbers of the last layer's output a position. Kept on disk in parts of whole dialogues
(safetensors, so one dialogue is read without the rest); a part is whole or absent, so a killed run resumes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from serving.models.packed import Network
from serving.models.packed_lm import PackedLM
from tuning.selfgen import Dialogue, text_key

_PART = 64


@dataclass(frozen=True)
class Example:
    """One dialogue of n tokens: ids i64[n], features [n, F], and hidden [n, Ht] as the last layer leaves it."""

    ids: Tensor
    num_prompt: int
    features: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class _Part:
    """One file, opened once; `starts` are where its dialogues begin."""

    path: Path
    starts: tuple[int, ...]

    @cached_property
    def _file(self) -> Network:
        return safe_open(self.path, framework="pt")

    def read(self, index: int) -> Tensor:
        rows: Tensor = self._file.get_slice("features")[self.starts[index] : self.starts[index + 1]]
        return rows


class FeatureSet:
    """Examples by index, read when asked for."""

    def __init__(self, dialogues: Sequence[Dialogue], parts: Sequence[_Part]) -> None:
        self._dialogues = dialogues
        self._parts = parts
        self.lengths = [len(dialogue.ids) for dialogue in dialogues]

    def __len__(self) -> int:
        return len(self._dialogues)

    def __getitem__(self, index: int) -> Example:
        dialogue, part = self._dialogues[index], self._parts[index // _PART]
        rows = part.read(index % _PART).float()
        width = rows.shape[1] * 3 // 4
        ids = torch.from_numpy(dialogue.ids.astype(np.int64))
        return Example(ids, len(dialogue.prompt_ids), rows[:, :width], rows[:, width:])


def read_features(
    target: PackedLM,
    dialogues: Sequence[Dialogue],
    folder: Path,
    *,
    target_key: str,
    on_dialogues: Callable[[int], None],
) -> FeatureSet:
    """Read all `dialogues` with the target, one pass each, and keep what comes out in `folder`.

    The target's feature layers are the head's three and the number of layers. A part is named by its text and
    `target_key`, which tells the target from all others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for start in range(0, len(dialogues), _PART):
        batch = dialogues[start : start + _PART]
        path = folder / f"features-{text_key(batch, target_key)}.safetensors"
        if not path.is_file():
            _write(path, target, batch)
        ends = np.cumsum([0, *(len(dialogue.ids) for dialogue in batch)])
        parts.append(_Part(path, tuple(ends.tolist())))
        on_dialogues(len(batch))
    return FeatureSet(dialogues, parts)


def _write(path: Path, target: PackedLM, dialogues: Sequence[Dialogue]) -> None:
    rows = [target.all_features(dialogue.ids).bfloat16().cpu() for dialogue in dialogues]
    partial = path.with_suffix(".partial")
    save_file({"features": torch.cat(rows)}, partial)
    partial.replace(path)
