"""An EAGLE-3 head unrolled over whole texts: what it says at a position after drafting the last s tokens itself.

B texts of N positions, M of them reached by a step, H hidden size, Q query heads of D. Equal, position by position, to
what the head does when it drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from serving.models.eagle3 import Eagle3Head


@dataclass(frozen=True)
class Reached:
    """Where one step has got to, text by text: outputs [B, M, H] at the positions `places` i64[B, M].

    Texts may be reached at different numbers of positions: what is not in `is_real` [B, M] is padding.
    """

    out: Tensor
    places: Tensor
    is_real: Tensor
    embedded: Tensor
    # Of the first step at all positions; of later ones along the way to each place: [B, Q, N or M, D].
    keys: Sequence[Tensor]
    values: Sequence[Tensor]


class Unroll:
    """Runs `head` from the target's features, then from its own outputs, each one position on."""

    def __init__(self, head: Eagle3Head, *, max_length: int) -> None:
        self._head = head
        self._rotary = head.rotary(max_length)

    def first(self, features: Tensor, next_ids: Tensor) -> Reached:
        """At every position, of features [B, N, F] and the tokens i64[B, N] behind each position."""
        places = torch.arange(next_ids.shape[1]).expand(next_ids.shape)
        embedded = F.embedding(next_ids, self._head.embedding)
        joined, residual = self._head.layer_input(embedded, self._head.fc(features))
        query, key, value = self._projected(joined, places)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out = self._head.layer_output(residual, _flat(mixed))
        return Reached(out, places, torch.ones_like(places, dtype=torch.bool), embedded, [key], [value])

    def next(self, before: Reached, goes_on: Tensor) -> Reached | None:
        """One position behind each place where `goes_on` bool[B, M], read on the output there; None behind none."""
        goes_on = goes_on & before.is_real & (before.places < before.embedded.shape[1] - 1)
        most = int(goes_on.sum(dim=1).max())
        if not most:
            return None
        origin = torch.argsort(~goes_on, dim=1, stable=True)[:, :most]
        is_real = goes_on.gather(1, origin)
        places = before.places.gather(1, origin) + is_real.long()
        keys = [before.keys[0], *(_along(key, origin, 2) for key in before.keys[1:])]
        values = [before.values[0], *(_along(value, origin, 2) for value in before.values[1:])]
        embedded = _along(before.embedded, places, 1)
        joined, residual = self._head.layer_input(embedded, _along(before.out, origin, 1))
        query, key, value = self._projected(joined, places)
        keys.append(key)
        values.append(value)
        out = self._head.layer_output(residual, _flat(self._mixed(query, places, keys, values)))
        return Reached(out, places, is_real, before.embedded, keys, values)

    def _projected(self, joined: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, Q, M, D] of joined [B, M, 2 H]."""
        attention, dim = self._head.midlayer.self_attn, self._head.config.head_dim
        query, key, value = (
            project(joined).view(*joined.shape[:2], -1, dim).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cos, sin = (table[places] for table in self._rotary)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        group = query.shape[1] // key.shape[1]
        return query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)

    def _mixed(self, query: Tensor, places: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Attention [B, Q, M, D] of a later step s: over the first step's keys up to place - s, then one of each step,
        which is what the head finds in its cache when it has drafted the last s tokens.
        """
        n, step = keys[0].shape[2], len(keys) - 1
        is_hidden = torch.arange(n) > places[:, None, :, None] - step
        scores = (query @ keys[0].transpose(2, 3)).masked_fill(is_hidden, float("-inf"))
        own = [(query * key).sum(dim=-1, keepdim=True) for key in keys[1:]]
        weights = torch.softmax(torch.cat([scores, *own], dim=-1) * self._head.config.head_dim**-0.5, dim=-1)
        mixed = weights[..., :n] @ values[0]
        for i, value in enumerate(values[1:]):
            mixed = mixed + weights[..., n + i : n + i + 1] * value
        return mixed


def _along(x: Tensor, origin: Tensor, dim: int) -> Tensor:
    """x[B, ..., M, ...] at `origin` i64[B, M'] of its dimension `dim`."""
    shape = [1] * x.dim()
    shape[0], shape[dim] = origin.shape
    sizes = list(x.shape)
    sizes[dim] = origin.shape[1]
    return x.gather(dim, origin.reshape(shape).expand(sizes))


def _flat(mixed: Tensor) -> Tensor:
    """[B, M, Q * D] of [B, Q, M, D]."""
    return mixed.transpose(1, 2).flatten(2)
