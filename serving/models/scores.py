"""From logits to score tables: one copy to the host a step, whatever the batch.

R rows of all requests together, V logits a row; `id_map` i64[V] turns a reduced vocabulary into target ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serving.models.noise import gumbel
from serving.models.rows import first_argmax, log_sum_exp
from serving.protocols import ScoreRequest
from serving.types import Floats, Ids, ScoreTable


@dataclass(frozen=True, slots=True)
class _Columns:
    next_ids: Ids
    next_logits: Floats
    top_ids: Ids
    top_logits: Floats
    draft_logits: Floats
    logsumexp: Floats | None


def score_tables(
    logits: Tensor,
    requests: Sequence[ScoreRequest],
    *,
    id_map: Tensor | None = None,
    with_logsumexp: bool = False,
) -> list[ScoreTable]:
    """One table a request from float32 logits [R, V], R = the sum of num_rows, in order."""
    columns = _columns(logits, requests, id_map, with_logsumexp=with_logsumexp)
    tables, at = [], 0
    for request in requests:
        rows = slice(at, at + request.num_rows)
        tables.append(
            ScoreTable(
                draft_ids=request.draft_ids,
                next_ids=columns.next_ids[rows],
                next_logits=columns.next_logits[rows],
                draft_logits=columns.draft_logits[rows][:-1],
                top_ids=columns.top_ids[rows],
                top_logits=columns.top_logits[rows],
                logsumexp=None if columns.logsumexp is None else columns.logsumexp[rows],
            )
        )
        at += request.num_rows
    return tables


def _columns(
    logits: Tensor, requests: Sequence[ScoreRequest], id_map: Tensor | None, *, with_logsumexp: bool
) -> _Columns:
    top = first_argmax(logits)
    drawn = _drawn(logits, requests, top)
    # A reduced vocabulary has no column for most ids; only a full one scores other models' drafts.
    draft = _draft_columns(requests, device=logits.device) if id_map is None else torch.zeros_like(top)
    picks = torch.stack([top, drawn, draft], dim=1)
    values = logits.gather(1, picks)
    sums = [log_sum_exp(logits)[:, None]] if with_logsumexp else []
    ids = picks[:, :2] if id_map is None else id_map[picks[:, :2]]
    floats = torch.cat([values, *sums], dim=1).cpu().numpy()
    whole = ids.to(torch.int32).cpu().numpy()
    return _Columns(
        next_ids=whole[:, 1],
        next_logits=floats[:, 1],
        top_ids=whole[:, 0],
        top_logits=floats[:, 0],
        draft_logits=floats[:, 2],
        logsumexp=floats[:, 3] if with_logsumexp else None,
    )


def _draft_columns(requests: Sequence[ScoreRequest], *, device: torch.device) -> Tensor:
    """i64[R]: the draft token judged by each row; the last row of a block judges none and gets 0."""
    ids = np.zeros(sum(request.num_rows for request in requests), dtype=np.int64)
    at = 0
    for request in requests:
        ids[at : at + request.num_rows - 1] = request.draft_ids
        at += request.num_rows
    return torch.from_numpy(ids).to(device)


def _drawn(logits: Tensor, requests: Sequence[ScoreRequest], top: Tensor) -> Tensor:
    """i64[R]: what the model emits on each row; `top` itself for greedy requests."""
    if all(request.sampling.is_greedy for request in requests):
        return top
    drawn, at = top.clone(), 0
    for request in requests:
        first = len(request.ids) - request.num_rows + 1
        for row in range(0 if request.sampling.is_greedy else request.num_rows):
            noise = gumbel(request.sampling.seed, first + row, logits.shape[1]).to(logits.device)
            drawn[at + row] = (logits[at + row] / request.sampling.temperature + noise).argmax()
        at += request.num_rows
    return drawn
