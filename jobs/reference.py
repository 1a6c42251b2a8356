"""The other side of every comparison: transformers' `generate` on the same weights."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jobs.figures import Timing
from serving.models.loading import load_network
from serving.models.packed import Network
from serving.types import Ids


@dataclass(frozen=True)
class Answer:
    """Output ids of one prompt, stop id included, and when they came."""

    ids: list[int]
    timing: Timing


class StockGenerate:
    """The stock model with its stock loop. One thread setting, weights and dtype are those of the whole process."""

    def __init__(self, model: str, dtype: str, *, stop_ids: frozenset[int]) -> None:
        self.network: Network = load_network(model, {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])
        self._stop_ids = sorted(stop_ids)

    def run(self, prompts: Sequence[Ids], *, max_tokens: int, batch: int = 1, **options: Any) -> list[list[int]]:
        """Greedy output ids of every prompt; batches are padded on the left. `options` go to generate."""
        return [answer.ids for answer in self.answers(prompts, max_tokens=max_tokens, batch=batch, **options)]

    def answers(
        self, prompts: Sequence[Ids], *, max_tokens: int, batch: int = 1, temperature: float = 0.0, **options: Any
    ) -> list[Answer]:
        """An answer a prompt; at a temperature, sampled from the whole distribution by torch's own generator."""
        if temperature:
            options |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        found: list[Answer] = []
        for start in range(0, len(prompts), batch):
            found += self._batch(prompts[start : start + batch], max_tokens=max_tokens, options=options)
        return found

    def _batch(self, prompts: Sequence[Ids], *, max_tokens: int, options: dict[str, Any]) -> list[Answer]:
        longest = max(len(ids) for ids in prompts)
        padded = torch.full((len(prompts), longest), self._stop_ids[0], dtype=torch.int64)
        mask = torch.zeros_like(padded)
        for row, ids in enumerate(prompts):
            padded[row, longest - len(ids) :] = torch.from_numpy(ids.astype("int64"))
            mask[row, longest - len(ids) :] = 1
        device, clock = self.network.device, StepClock()
        with torch.inference_mode():
            found = self.network.generate(
                padded.to(device), attention_mask=mask.to(device), max_new_tokens=max_tokens, streamer=clock,
                eos_token_id=self._stop_ids, pad_token_id=self._stop_ids[0], **{"do_sample": False, **options},
            )  # fmt: skip
        outputs = [self._cut(row.tolist()) for row in found[:, longest:]]
        return [Answer(ids, clock.timing(len(ids))) for ids in outputs]

    def _cut(self, ids: list[int]) -> list[int]:
        ends = [index for index, token in enumerate(ids) if token in self._stop_ids]
        return ids[: ends[0] + 1] if ends else ids


@dataclass
class StepClock:
    """A streamer that only notes when each step's tokens came; the first call is the prompt's and counts as 0 s."""

    times_s: list[float] = field(default_factory=list)

    def put(self, tokens: Tensor) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""

    def timing(self, num_tokens: int) -> Timing:
        """Of a row with so many tokens: without drafts a step is a token, with drafts (one row) the last is its end."""
        started_s, *steps = self.times_s
        last_s = steps[min(num_tokens, len(steps)) - 1]
        return Timing(num_tokens, steps[0] - started_s, last_s - started_s)
