"""From logits to score tables: one copy to the host a step, whatever the batch, and log probabilities apart.

R rows of all requests together, V logits a row; `id_map` i64[V] turns a reduced vocabulary into target ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serving.models.adjust import adjust
from serving.models.draws import RowDraw, draw
from serving.models.logprobs import row_logprobs
from serving.models.noise import noise_keys
from serving.models.rows import kernels_for
from serving.protocols import ScoreRequest
from serving.types import Floats, Ids, RowLogprobs, ScoreTable


@dataclass(frozen=True, slots=True)
class _Columns:
    next_ids: Ids
    next_logits: Floats
    top_ids: Ids
    top_logits: Floats
    draft_logits: Floats
    logsumexp: Floats | None


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The rows of sampled requests, and the column i64[n] that each of them emits."""

    rows: list[int]
    columns: Tensor


def score_tables(
    logits: Tensor,
    requests: Sequence[ScoreRequest],
    *,
    id_map: Tensor | None = None,
    with_logsumexp: bool = False,
) -> list[ScoreTable]:
    """One table a request from float32 logits [R, V], R = the sum of num_rows, in order. Adjusts `logits` in place.

    A reduced vocabulary is a drafter's: there logits are not adjusted, which costs acceptance and never exactness.
    """
    spans = _spans(requests)
    raw = {i: logits[spans[i]].clone() for i, request in enumerate(requests) if request.num_logprobs is not None}
    if id_map is None:
        for request, span in zip(requests, spans, strict=True):
            if request.sampling.adjusts_logits:
                adjust(logits[span], request)
    columns = _columns(logits, requests, spans, id_map, with_logsumexp=with_logsumexp)
    return [
        ScoreTable(
            draft_ids=request.draft_ids,
            next_ids=columns.next_ids[span],
            next_logits=columns.next_logits[span],
            draft_logits=columns.draft_logits[span][:-1],
            top_ids=columns.top_ids[span],
            top_logits=columns.top_logits[span],
            logsumexp=None if columns.logsumexp is None else columns.logsumexp[span],
            logprobs=_logprobs(raw.get(i), request, columns.next_ids[span]),
        )
        for i, (request, span) in enumerate(zip(requests, spans, strict=True))
    ]


def _spans(requests: Sequence[ScoreRequest]) -> list[slice]:
    """The rows of each request."""
    ends = accumulate(request.num_rows for request in requests)
    return [slice(end - request.num_rows, end) for end, request in zip(ends, requests, strict=True)]


def _columns(
    logits: Tensor, requests: Sequence[ScoreRequest], spans: Sequence[slice], id_map: Tensor | None, *,
    with_logsumexp: bool,
) -> _Columns:  # fmt: skip
    # A reduced vocabulary has no column for most ids; only a full one scores other models' drafts.
    draft = np.zeros(len(logits), dtype=np.int64)
    if id_map is None:
        for request, span in zip(requests, spans, strict=True):
            draft[span][:-1] = request.draft_ids  # the last row of a block judges none
    kernels, drawn = kernels_for(logits), _drawn(logits, requests, spans, id_map)
    if kernels is None:
        ids, numbers = _read_by_torch(logits, drawn, draft, id_map, with_logsumexp=with_logsumexp)
    else:
        picked = np.full(len(logits), -1, dtype=np.int64)
        picked[drawn.rows] = drawn.columns.numpy()
        columns, numbers = kernels.columns(logits, picked, draft, with_logsumexp=with_logsumexp)
        ids = columns.astype(np.int32) if id_map is None else id_map.numpy()[columns].astype(np.int32)
    return _Columns(
        next_ids=ids[:, 1],
        next_logits=numbers[:, 1],
        top_ids=ids[:, 0],
        top_logits=numbers[:, 0],
        draft_logits=numbers[:, 2],
        logsumexp=numbers[:, 3] if with_logsumexp else None,
    )


def _read_by_torch(
    logits: Tensor, drawn: _Drawn, draft: npt.NDArray[np.int64], id_map: Tensor | None, *, with_logsumexp: bool
) -> tuple[npt.NDArray[np.int32], Floats]:
    """As NativeKernels.columns, with ids in place of columns; one copy to the host."""
    top = logits.argmax(dim=-1)
    following = top.index_copy(0, torch.tensor(drawn.rows, device=top.device, dtype=torch.int64), drawn.columns)
    picks = torch.stack([top, following, torch.from_numpy(draft).to(top.device)], dim=1)
    values = logits.gather(1, picks)
    sums = [logits.logsumexp(dim=-1)[:, None]] if with_logsumexp else []
    ids = picks[:, :2] if id_map is None else id_map[picks[:, :2]]
    bits = torch.cat([ids.to(torch.int32), torch.cat([values, *sums], dim=1).view(torch.int32)], dim=1).cpu().numpy()
    return bits[:, :2], bits[:, 2:].view(np.float32)


def _drawn(logits: Tensor, requests: Sequence[ScoreRequest], spans: Sequence[slice], id_map: Tensor | None) -> _Drawn:
    draws = [
        RowDraw(row, request.sampling, noise_keys(request.sampling.seed, len(request.ids) + 1 + row - span.stop))
        for request, span in zip(requests, spans, strict=True)
        if not request.sampling.is_greedy
        for row in range(span.start, span.stop)
    ]
    none = torch.empty(0, dtype=torch.int64, device=logits.device)
    return _Drawn([one.row for one in draws], draw(logits, draws, id_map) if draws else none)


def _logprobs(raw: Tensor | None, request: ScoreRequest, next_ids: Ids) -> RowLogprobs | None:
    if raw is None or request.num_logprobs is None:
        return None
    return row_logprobs(raw, draft_ids=request.draft_ids, next_ids=next_ids, num_top=request.num_logprobs)
