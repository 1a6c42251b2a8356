"""Tokens drawn from rows of logits, by the native kernel on a CPU, by torch elsewhere.

R rows, V columns; `id_map` i64[V] turns columns of a reduced vocabulary into target ids, for the noise goes by those.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serving.models.native import DrawPlan
from serving.models.noise import Keys, gumbel
from serving.models.rows import kernels_for
from serving.requests import Sampling
from serving.types import Floats

# Rows that torch draws from in one piece: it takes some forty bytes for each of their logits.
_AT_ONCE = 16


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
    pieces = [draws[start : start + _AT_ONCE] for start in range(0, len(draws), _AT_ONCE)]
    return torch.cat([_draw_rows(logits, _plan(piece), ids) for piece in pieces])


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


def _draw_rows(logits: Tensor, plan: DrawPlan, ids: Tensor) -> Tensor:
    """i64[n]: the columns that `plan` draws, by torch and without waiting for the device."""
    rows = logits[torch.from_numpy(plan.rows).to(logits.device)]
    keys = torch.from_numpy(plan.keys.astype(np.int64)).to(logits.device)
    noisy = rows / _column(plan.temperatures, rows) + gumbel(keys, ids)
    return noisy.masked_fill(rows < _floors(rows, plan), -math.inf).argmax(dim=-1)


def _floors(rows: Tensor, plan: DrawPlan) -> Tensor:
    """float32[n, 1]: the lowest logits that min_p, then top_k, then top_p leave, each of what the one before has."""
    num_columns = rows.shape[1]
    floors = rows.amax(dim=1, keepdim=True) + _column(_min_p_gaps(plan), rows)
    is_cut = (plan.top_k > 0) & (plan.top_k < num_columns)
    if not is_cut.any() and (plan.top_p >= 1).all():
        return floors
    ordered = rows.sort(dim=1, descending=True).values
    last = _column(np.where(is_cut, plan.top_k, num_columns) - 1, rows)
    floors = torch.maximum(floors, ordered.gather(1, last))
    return torch.where(_column(plan.top_p < 1, rows), _nucleus(ordered, floors, plan), floors)


def _min_p_gaps(plan: DrawPlan) -> Floats:
    """float32[n]: how far below the highest logit min_p ends, without limit where it is 0."""
    with np.errstate(divide="ignore"):
        return (plan.temperatures * np.log(plan.min_p)).astype(np.float32)


def _nucleus(ordered: Tensor, floors: Tensor, plan: DrawPlan) -> Tensor:
    """float32[n, 1]: the lowest logits of the smallest heads of `ordered` that hold top_p of what `floors` leave."""
    is_left = ordered >= floors
    scaled = ordered.masked_fill(~is_left, -math.inf).double() / _column(plan.temperatures.astype(np.float64), ordered)
    mass = torch.softmax(scaled, dim=1).cumsum(dim=1)
    size = ((mass < _column(plan.top_p.astype(np.float64), ordered)) & is_left).sum(dim=1, keepdim=True)
    largest = is_left.sum(dim=1, keepdim=True).clamp(min=1) - 1
    return ordered.gather(1, torch.minimum(size, largest))


def _column(values: npt.NDArray[Any], like: Tensor) -> Tensor:
    """[n, 1] of `values` [n], beside the rows of `like`."""
    return torch.from_numpy(values).to(like.device)[:, None]
