"""What an EAGLE-3 head learns from: the target's features and last hidden state at the positions of its own text.

F = 3 Ht features and Ht numbers of the last layer's output a position. Kept on disk in parts of whole dialogues
(safetensors, so one dialogue is read without the rest); a part is whole or absent, so a killed run resumes. A text that
is written here leaves its features as it is written; any other is read for them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Example:
    """One dialogue of n tokens: ids i64[n]; features [n - 1, F] and hidden [n - 1, Ht], as the last layer leaves it, of
    all but the last, behind which nothing is said.
    """

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


@dataclass(frozen=True)
class _Place:
    """Where a dialogue's features are."""

    part: _Part
    index: int


class FeatureSet:
    """Examples by index, read when asked for."""

    def __init__(self, dialogues: Sequence[Dialogue], places: Sequence[_Place]) -> None:
        self._dialogues = dialogues
        self._places = places
        self.lengths = [len(dialogue.ids) for dialogue in dialogues]

    def __len__(self) -> int:
        return len(self._dialogues)

    def __getitem__(self, index: int) -> Example:
        dialogue, place = self._dialogues[index], self._places[index]
        rows = place.part.read(place.index).float()
        width = rows.shape[1] * 3 // 4
        ids = torch.from_numpy(dialogue.ids.astype(np.int64))
        return Example(ids, len(dialogue.prompt_ids), rows[:, :width], rows[:, width:])

    def of(self, dialogues: Sequence[Dialogue]) -> "FeatureSet":
        """Those of `dialogues`, in their order. Raises KeyError for one that is not here."""
        places = {_key(dialogue): place for dialogue, place in zip(self._dialogues, self._places, strict=True)}
        return FeatureSet(dialogues, [places[_key(dialogue)] for dialogue in dialogues])


@dataclass
class FeatureFolder:
    """Features of texts in `path`, in files named by the text and by `target_key`, which tells the target from others.

    `layers` of the target are those whose inputs a head reads, and their number in all, for the last one's output.
    As a selfgen.Keeper it keeps those that `take` has got while the text was written.
    """

    path: Path
    target_key: str
    layers: tuple[int, ...]
    _taken: dict[str, Tensor] = field(default_factory=dict)

    def take(self, request_id: str, features: Tensor) -> None:
        """[n - 1, F + Ht] of a request's n tokens."""
        self._taken[request_id] = features.bfloat16().cpu()

    def forget(self, request_id: str) -> None:
        self._taken.pop(request_id, None)

    def keep(self, request_ids: Sequence[str], dialogues: Sequence[Dialogue]) -> None:
        self._write(dialogues, [self._taken.pop(request_id) for request_id in request_ids])

    def lacks(self, dialogues: Sequence[Dialogue]) -> bool:
        """Whether these, in this order, are in no file."""
        return not self._file(dialogues).is_file()

    def read(self, target: PackedLM, dialogues: Sequence[Dialogue]) -> None:
        """Have the target, whose feature layers are `layers`, read `dialogues`, a pass each."""
        nothing = target.store.features[0, :0]
        texts = [dialogue.ids[:-1] for dialogue in dialogues]
        rows = [target.all_features(ids) if len(ids) else nothing for ids in texts]
        self._write(dialogues, [features.bfloat16().cpu() for features in rows])

    def all(self, parts: Iterable[Sequence[Dialogue]]) -> FeatureSet:
        """Of parts that are all here."""
        dialogues: list[Dialogue] = []
        places: list[_Place] = []
        for batch in parts:
            ends = np.cumsum([0, *(len(dialogue.ids) - 1 for dialogue in batch)])
            part = _Part(self._file(batch), tuple(ends.tolist()))
            dialogues += batch
            places += [_Place(part, index) for index in range(len(batch))]
        return FeatureSet(dialogues, places)

    def _file(self, dialogues: Sequence[Dialogue]) -> Path:
        return self.path / f"features-{text_key(dialogues, self.target_key)}.safetensors"

    def _write(self, dialogues: Sequence[Dialogue], rows: Sequence[Tensor]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        file = self._file(dialogues)
        partial = file.with_suffix(".partial")
        save_file({"features": torch.cat([*rows])}, partial)
        partial.replace(file)


def _key(dialogue: Dialogue) -> tuple[bytes, int]:
    return dialogue.ids.tobytes(), len(dialogue.prompt_ids)
