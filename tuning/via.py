"""How well a target without some layers stands for the whole one: many masks, in place, against cached rows.

The target is loaded once. Its own rows for every scored position are computed once and kept: n rows of V float32.
"""

from collections.abc import Sequence

import torch

from serving.models.kv_store import KVShape, KVStore
from serving.models.loading import LoadOptions, load_packed_lm
from serving.models.packed_lm import PackedLM
from serving.models.tokenizer import ChatTokenizer
from serving.types import Floats
from tuning.dimr import Agreement, compare, mean
from tuning.masks import Mask
from tuning.selfgen import Dialogue

_PREFILL = 4096


def excerpts(dialogues: Sequence[Dialogue], *, num_rows: int, max_output: int = 48) -> list[Dialogue]:
    """The beginnings of as many dialogues as give `num_rows` scored positions, at most `max_output` from each."""
    taken: list[Dialogue] = []
    left = num_rows
    for dialogue in dialogues:
        if left <= 0:
            break
        output = dialogue.output_ids[: min(max_output, left)]
        if len(output):
            taken.append(Dialogue(dialogue.prompt_ids, output))
            left -= len(output)
    return taken


def load_target(model: str, *, dtype: str, max_length: int) -> PackedLM:
    """The target with one KV row of `max_length` slots."""
    return load_packed_lm(
        model,
        LoadOptions(
            role="target",
            dtype=dtype,
            num_rows=1,
            max_length=max_length,
            prefill_chunk=_PREFILL,
            vocab_size=ChatTokenizer.load(model).vocab_size,
        ),
    )


class MaskBench:
    """Judges masks of `target` on `dialogues`."""

    def __init__(self, target: PackedLM, dialogues: Sequence[Dialogue]) -> None:
        self._target = target
        self._dialogues = list(dialogues)
        self._stores: dict[tuple[KVShape, ...], KVStore] = {}
        self._rows = [_log_probs(target, dialogue) for dialogue in self._dialogues]

    @property
    def num_layers(self) -> int:
        return len(self._target.store.shapes)

    @property
    def num_rows(self) -> int:
        """Scored positions."""
        return sum(len(rows) for rows in self._rows)

    def agreement(self, skipped: Mask) -> Agreement:
        """Of the target without the layers `skipped` with the whole one. Texts that begin alike share that part."""
        slim = self.slim(skipped)
        return mean(
            [
                (len(rows), compare(rows, _log_probs(slim, dialogue)))
                for dialogue, rows in zip(self._dialogues, self._rows, strict=True)
            ]
        )

    def slim(self, skipped: Mask) -> PackedLM:
        """The target without the layers `skipped`, on its own weights, in rows that all masks of a size share."""
        kept = [layer for layer in range(self.num_layers) if layer not in skipped]
        decoder = self._target.decoder.keeping(kept)
        whole, shapes = self._target.store, tuple(decoder.shapes)
        if shapes not in self._stores:
            self._stores[shapes] = KVStore(list(shapes), 1, whole.capacity, whole.dtype, whole.device)
        for row in self._stores[shapes].rows:
            row.length = 0  # of another mask
        return self._target.with_decoder(decoder, self._stores[shapes], with_logsumexp=False)


def _log_probs(model: PackedLM, dialogue: Dialogue) -> Floats:
    """float32 [n, V]: of each token of the output, given what stands before it."""
    logits = model.all_logits(dialogue.ids[:-1], first=len(dialogue.prompt_ids) - 1)
    rows: Floats = torch.log_softmax(logits, dim=-1).numpy()
    return rows
