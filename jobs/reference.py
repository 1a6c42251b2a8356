"""The other side of every comparison: transformers' `generate`, greedy, on the same weights."""

from collections.abc import Sequence
from typing import Any

import torch

from serving.models.loading import load_network
from serving.types import Ids


class StockGenerate:
    """The stock model with its stock loop. One thread setting, weights and dtype are those of the whole process."""

    def __init__(self, model: str, dtype: str, *, stop_ids: frozenset[int]) -> None:
        self._network = load_network(model, {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])
        self._stop_ids = sorted(stop_ids)

    def run(self, prompts: Sequence[Ids], *, max_tokens: int, batch: int = 1, **options: Any) -> list[list[int]]:
        """Output ids of every prompt, stop id included; batches are padded on the left. `options` go to generate."""
        outputs: list[list[int]] = []
        for start in range(0, len(prompts), batch):
            outputs += self._batch(prompts[start : start + batch], max_tokens=max_tokens, options=options)
        return outputs

    def _batch(self, prompts: Sequence[Ids], *, max_tokens: int, options: dict[str, Any]) -> list[list[int]]:
        longest = max(len(ids) for ids in prompts)
        padded = torch.full((len(prompts), longest), self._stop_ids[0], dtype=torch.int64)
        mask = torch.zeros_like(padded)
        for row, ids in enumerate(prompts):
            padded[row, longest - len(ids) :] = torch.from_numpy(ids.astype("int64"))
            mask[row, longest - len(ids) :] = 1
        with torch.inference_mode():
            found = self._network.generate(
                padded, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False,
                eos_token_id=self._stop_ids, pad_token_id=self._stop_ids[0], **options,
            )  # fmt: skip
        return [self._cut(row.tolist()) for row in found[:, longest:]]

    def _cut(self, ids: list[int]) -> list[int]:
        ends = [index for index, token in enumerate(ids) if token in self._stop_ids]
        return ids[: ends[0] + 1] if ends else ids
