"""Tokens drawn from rows of logits, by the native kernel on a CPU, by torch elsewhere.

R rows, V columns; `id_map` i64[V] turns columns of a reduced vocabulary into target ids, for the noise goes by those.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serving.models.native import DrawPlan
from serving.models.noise import Keys, gumbel
from serving.models.rows import first_argmax, kernels_for
from serving.requests import Sampling


@dataclass(frozen=True, slots=True)
class RowDraw:
    """Draw from row `row` of the logits as `sampling` says, with the noise of `keys`."""

    row: int
    sampling: Sampling
    keys: Keys


def draw(logits: Tensor, draws: Sequence[RowDraw], id_map: Tensor | None) -> Tensor:
    """i64[n]: the column drawn for each of `draws` from float32 logits [R, V]."""
    kernels = kernels_for(logits)
    if kernels is not None:
        return kernels.draw(logits, _plan(draws), None if id_map is None else id_map.to(torch.int32))
    ids = torch.arange(logits.shape[1], device=logits.device) if id_map is None else id_map
    return torch.stack([_draw_one(logits[one.row], one, ids) for one in draws])


def _plan(draws: Sequence[RowDraw]) -> DrawPlan:
    samplings = [one.sampling for one in draws]
    return DrawPlan(
        rows=np.array([one.row for one in draws], dtype=np.int64),
        temperatures=np.array([sampling.temperature for sampling in samplings], dtype=np.float32),
        top_k=np.array([sampling.top_k for sampling in samplings], dtype=np.int64),
        top_p=np.array([sampling.top_p for sampling in samplings], dtype=np.float32),
        min_p=np.array([sampling.min_p for sampling in samplings], dtype=np.float32),
        keys=np.array([one.keys for one in draws], dtype=np.uint32),
    )


def _draw_one(row: Tensor, one: RowDraw, ids: Tensor) -> Tensor:
    noisy = row / one.sampling.temperature + gumbel(one.keys, ids)
    return first_argmax(noisy.masked_fill(row < _floor(row, one.sampling), -math.inf)[None])[0]


def _floor(row: Tensor, sampling: Sampling) -> Tensor:
    """The lowest logit that min_p, then top_k, then top_p leave: each looks at what the one before has left."""
    floor = torch.full_like(row[0], -math.inf)
    if sampling.min_p > 0:
        floor = row.max() + sampling.temperature * math.log(sampling.min_p)
    if 0 < sampling.top_k < len(row):
        floor = torch.maximum(floor, row.topk(sampling.top_k).values[-1])
    if sampling.top_p < 1:
        kept = row[row >= floor].sort(descending=True).values
        mass = torch.softmax(kept.double() / sampling.temperature, dim=0).cumsum(0)
        floor = kept[int((mass < sampling.top_p).sum().clamp(max=len(kept) - 1))]
    return floor
