"""Attention of a packed step over the KV store: segment by segment anywhere, on a GPU in one flash kernel a layer.

T packed tokens, Q query heads, KV key heads of D.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from serving.models.kv_store import KVShape, KVStore
from serving.models.packed import PackedStep, Ragged, Segment, pack
from serving.types import as_ids

log = logging.getLogger(__name__)

PAGE = 256  # slots: flash attention takes a KV row as one page, whose size must be a multiple of this
_MOST_ERROR = 0.05  # of a trial's outputs, which are sums of numbers of size 1, weighted


def attend_packed(
    step: PackedStep, caches: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor,
    *, scale: float, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """query [1, Q, T, D], key and value [1, KV, T, D] -> [T, Q, D]; stores keys and values in one layer's caches."""
    keys, values = caches
    keys[step.rows, :, step.positions] = key[0].transpose(0, 1).to(keys.dtype)
    values[step.rows, :, step.positions] = value[0].transpose(0, 1).to(values.dtype)
    if step.ragged is not None and not softcap:
        return _attend_ragged(step.ragged, query, caches, scale=scale, window=window)
    if not step.segments:
        raise RuntimeError("soft-capped attention goes segment by segment, which no captured step can")
    outputs, at = [], 0
    for segment in step.segments:
        length = segment.stop - segment.start
        cached = (keys[segment.row.index, :, : segment.stop], values[segment.row.index, :, : segment.stop])
        rows = query[0, :, at : at + length]
        outputs.append(_attend(rows, cached, segment, scale=scale, window=window, softcap=softcap))
        at += length
    return torch.cat(outputs)


def _attend(
    query: Tensor,
    cached: tuple[Tensor, Tensor],
    segment: Segment,
    *,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """One segment: query [Q, n, D] over cached [KV, stop, D] -> [n, Q, D]."""
    keys, values = (part.to(query.dtype) for part in cached)
    visible = _visible(segment, window=window, device=query.device)
    if not softcap:
        mixed = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=visible, scale=scale, enable_gqa=True
        )
        return mixed[0].transpose(0, 1)
    group = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = softcap * torch.tanh(query @ keys.transpose(1, 2) * scale / softcap)
    weights = torch.softmax(scores.float().masked_fill(~visible, float("-inf")), dim=-1).to(query.dtype)
    return (weights @ values).transpose(0, 1)


def _visible(segment: Segment, *, window: int, device: torch.device) -> Tensor:
    """bool [n, stop]: which cached positions each row of the segment sees."""
    rows = torch.arange(segment.start, segment.stop, device=device)[:, None]
    columns = torch.arange(segment.stop, device=device)[None]
    visible = columns <= rows
    return visible & (columns > rows - window) if window else visible


def _attend_ragged(
    ragged: Ragged, query: Tensor, caches: tuple[Tensor, Tensor], *, scale: float, window: int
) -> Tensor:
    """query [1, Q, T, D] over caches [rows, KV, slots, D] -> [T, Q, D]."""
    keys, values = (one.transpose(1, 2) for one in caches)
    mixed = _flash(
        query[0].transpose(0, 1).to(keys.dtype), keys, values, ragged,
        scale=scale, window=window, num_splits=_num_splits(keys.device),
    )  # fmt: skip
    return mixed.to(query.dtype)


def _flash(
    query: Tensor, keys: Tensor, values: Tensor, ragged: Ragged, *, scale: float, window: int, num_splits: int | None
) -> Tensor:
    """query [T, Q, D] over pages [rows, slots, KV, D] -> [T, Q, D]."""
    mixed = varlen_attn(
        query, keys, values, ragged.starts,
        ragged.starts,  # FlashAttention-2 wants positions of keys as well, and reads none where there are pages
        ragged.longest, keys.shape[1],
        scale=scale,
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=True,
        seqused_k=ragged.used,
        block_table=ragged.rows,
        num_splits=num_splits,
    )  # fmt: skip
    assert isinstance(mixed, Tensor)  # a pair only where more is asked for
    return mixed


@cache
def _num_splits(device: torch.device) -> int | None:
    """1 where torch lets one say so: then a sequence's numbers do not depend on who else is in the batch."""
    page, bounds = torch.zeros(1, PAGE, 1, 64, dtype=torch.bfloat16, device=device), torch.tensor([0, 1], device=device)
    ragged = Ragged(bounds.int(), bounds[1:].int(), bounds[:1, None].int(), longest=1)
    try:
        _flash(page[0, :1], page, page, ragged, scale=1.0, window=0, num_splits=1)
    except RuntimeError:  # some versions have no such argument for FlashAttention-2
        return None
    return 1


def may_flash(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there can be flash attention at all."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def has_flash(shapes: Sequence[KVShape], capacity: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether flash attention runs on KV rows of `capacity` slots there, and says what attention by segments says."""
    if not may_flash(dtype, device):
        return False
    try:
        worst = _worst(flash_error(shape, capacity, dtype, device) for shape in set(shapes))
    except RuntimeError as error:  # torch's word for a kernel that this card, or these shapes, do not have
        log.warning("no flash attention here, sequences attend one by one: %s", error)
        return False
    agrees = worst <= _MOST_ERROR
    if not agrees:
        log.warning("flash attention is off by %.3f here, sequences attend one by one", worst)
    return agrees


def flash_error(shape: KVShape, capacity: int, dtype: torch.dtype, device: torch.device) -> float:
    """The most by which the two differ on a text's beginning, an end that fills its row, and an empty sequence."""
    store = KVStore([shape], 2, capacity, dtype, device, has_flash=True)
    ids, made = as_ids([1] * capacity), torch.Generator(device).manual_seed(0)
    for filled in (*store.keys, *store.values):
        filled.normal_(generator=made)
    step = pack([Segment(store.rows[0], ids, 0, 3), Segment(store.rows[1], ids, capacity - 7, capacity)], store)
    arrays = torch.tensor([[0, 3, 10, 10], [3, capacity, 0, 0], [0, 1, 2, 0]], dtype=torch.int32, device=device)
    ragged = Ragged(arrays[0], arrays[1, :3], arrays[2, :3, None], longest=16)
    size, group = step.num_tokens, 2
    query, key, value = (
        torch.randn(1, heads, size, shape.head_dim, dtype=dtype, device=device, generator=made)
        for heads in (group * shape.num_heads, shape.num_heads, shape.num_heads)
    )
    caches, scale = (store.keys[0], store.values[0]), shape.head_dim**-0.5
    heads = (query, key, value)
    with torch.inference_mode():
        return _worst(_difference(step, ragged, caches, heads, scale=scale, window=window) for window in (0, 5))


def _difference(
    step: PackedStep, ragged: Ragged, caches: tuple[Tensor, Tensor], heads: tuple[Tensor, Tensor, Tensor],
    *, scale: float, window: int,
) -> float:  # fmt: skip
    """The most by which flash attention and attention by segments differ."""
    found, expected = (
        attend_packed(replace(step, ragged=one), caches, *heads, scale=scale, window=window).float()
        for one in (ragged, None)
    )
    return float((found - expected).abs().max())


def _worst(errors: Iterable[float]) -> float:
    """The largest; NaN if any is, which Python's `max` may pass over."""
    return float(torch.tensor(list(errors)).max())
