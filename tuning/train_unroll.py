"""An EAGLE-3 head unrolled over a whole text: what it would say at every position after drafting s tokens itself.

B texts of N positions, H hidden size, Q query heads of D. Equal, position by position, to what the head does when it
drafts.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from serving.models.eagle3 import Eagle3Head


class Unroll:
    """Runs `head` `steps` times; each later step reads the outputs of the one before, one position on."""

    def __init__(self, head: Eagle3Head, *, steps: int, max_length: int) -> None:
        self._head = head
        self._steps = steps
        self._rotary = head.rotary(max_length)

    def outputs(self, features: Tensor, next_ids: Tensor) -> Iterator[Tensor]:
        """Outputs [B, N, H], step by step, of features [B, N, F] and the tokens i64[B, N] behind each position.

        Step s says nothing about the first s positions.
        """
        head = self._head
        embedded = F.embedding(next_ids, head.embedding)
        g = head.fc(features)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for _ in range(self._steps):
            joined, residual = head.layer_input(embedded, g)
            out = head.layer_output(residual, self._mixed(joined, keys, values))
            yield out
            g = F.pad(out[:, :-1], (0, 0, 1, 0))

    def _mixed(self, joined: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attention [B, N, Q * D] of step s = len(keys), whose keys and values are added to the lists.

        Query p sees the first step's keys up to p - s, then one key of each later step: what it would find in its
        cache, having drafted the last s tokens itself.
        """
        attention, (batch, n, _) = self._head.midlayer.self_attn, joined.shape
        dim = self._head.config.head_dim
        query, key, value = (
            project(joined).view(batch, n, -1, dim).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cos, sin = (table[None, :n] for table in self._rotary)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        group = query.shape[1] // key.shape[1]
        keys.append(key.repeat_interleave(group, 1))
        values.append(value.repeat_interleave(group, 1))
        step = len(keys) - 1
        if step == 0:
            mixed = F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
            return mixed.transpose(1, 2).reshape(batch, n, -1)
        places = torch.arange(n)
        hidden = places[None] > places[:, None] - step
        scores = (query @ keys[0].transpose(2, 3)).masked_fill(hidden, float("-inf"))
        own = [(query * _later(keys[i], step - i)).sum(dim=-1, keepdim=True) for i in range(1, step + 1)]
        weights = torch.softmax(torch.cat([scores, *own], dim=-1) * dim**-0.5, dim=-1)
        mixed = weights[..., :n] @ values[0]
        for i in range(1, step + 1):
            mixed = mixed + weights[..., n + i - 1 : n + i] * _later(values[i], step - i)
        return mixed.transpose(1, 2).reshape(batch, n, -1)


def _later(x: Tensor, count: int) -> Tensor:
    """x[B, heads, N, D] moved `count` positions on: entry p is what stood at p - count."""
    return F.pad(x[:, :, : x.shape[2] - count], (0, 0, count, 0)) if count else x
