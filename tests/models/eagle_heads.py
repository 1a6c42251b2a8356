"""Small random EAGLE-3 heads, on disk and in memory, and the plainest way to run one."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from serving.models.eagle3 import Eagle3Config, Eagle3Head
from serving.types import Ids
from tests.models.tiny import VOCAB

HIDDEN, TARGET_HIDDEN, DRAFT_VOCAB = 64, 48, 40
_LAYER = {
    "hidden_size": HIDDEN, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": VOCAB, "num_hidden_layers": 1, "max_position_embeddings": 256,
}  # fmt: skip


def tiny_head(seed: int = 0, *, norm_before_residual: bool = False) -> Eagle3Head:
    """A random head whose logits are well apart."""
    torch.manual_seed(seed)
    config = Eagle3Config(LlamaConfig(**_LAYER), DRAFT_VOCAB, TARGET_HIDDEN, norm_before_residual)
    target_ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    head = Eagle3Head(
        config, embedding=torch.randn(VOCAB, HIDDEN), lm_head=torch.randn(DRAFT_VOCAB, HIDDEN), target_ids=target_ids
    )
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.15)
    return head.eval().requires_grad_(False)


def write_head(head: Eagle3Head, folder: Path, *, layout: str = "authors", **changes: Any) -> None:
    """As a checkpoint with all matrices of its own; `changes` are config keys."""
    tensors = {name: p.clone() for name, p in head.state_dict().items()}
    tensors["d2t"] = head.target_ids - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, head.target_ids, True)
    tensors |= {"embed_tokens.weight": head.embedding.clone(), "lm_head.weight": head.lm_head.clone()}
    shared = {"draft_vocab_size": DRAFT_VOCAB, "target_hidden_size": TARGET_HIDDEN}
    shared["norm_before_residual"] = head.config.norm_before_residual
    config: dict[str, Any] = {**_LAYER, **shared}
    if layout == "speculators":
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": _LAYER, **shared}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "model.safetensors")


def plain_output(head: Eagle3Head, features: Tensor, ids: Ids) -> Tensor:
    """[H]: the head's output at the last position of `ids`, position by position and without any cache.

    features [m, F]: positions from m on stand on the output of the position before.
    """
    attention, dim = head.midlayer.self_attn, head.config.head_dim
    cos, sin = head.rotary(len(ids))
    following = torch.from_numpy(ids[1:].astype("int64"))
    keys: list[Tensor] = []
    values: list[Tensor] = []
    out = torch.zeros(HIDDEN)
    for p in range(len(following)):
        g = head.fc(features[p]) if p < len(features) else out
        joined, residual = head.layer_input(head.embedding[following[p]], g)
        query, key = (_rotated(project(joined).view(-1, dim), cos[p], sin[p])
                      for project in (attention.q_proj, attention.k_proj))  # fmt: skip
        keys.append(key)
        values.append(attention.v_proj(joined).view(-1, dim))
        group = len(query) // len(key)
        mixed = []
        for h in range(len(query)):
            scores = torch.stack([query[h] @ k[h // group] for k in keys]) * dim**-0.5
            mixed.append(torch.softmax(scores, 0) @ torch.stack([v[h // group] for v in values]))
        out = head.layer_output(residual, torch.cat(mixed))
    return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
