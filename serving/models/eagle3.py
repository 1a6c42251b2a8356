"""EAGLE-3 draft heads (Li et al., arXiv 2503.01840): one decoder layer over the target's features.

H hidden size of the head, Ht of the target, F = 3 Ht features a position, V target vocabulary, Vd draft vocabulary. At
position p the layer reads `fc`(features of p), or its own output at p - 1 where the target has not been, together with
the embedding of the token at p + 1, and predicts the token at p + 2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from serving.errors import ModelError

NUM_FEATURES = 3


@dataclass(frozen=True)
class Eagle3Config:
    """Shape of a head; `feature_layers` are target layers whose input it reads, None for the usual three."""

    layer: LlamaConfig
    draft_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool = False
    feature_layers: tuple[int, ...] | None = None

    @property
    def hidden_size(self) -> int:
        return int(self.layer.hidden_size)

    @property
    def head_dim(self) -> int:
        return int(getattr(self.layer, "head_dim", None) or self.hidden_size // self.layer.num_attention_heads)

    def layers_of(self, num_target_layers: int) -> tuple[int, ...]:
        """Target layers whose input is a feature: layers 2, L // 2 and L - 3 where the checkpoint names none."""
        usual = (2, num_target_layers // 2, num_target_layers - 3)
        layers = self.feature_layers or usual
        if len(layers) != NUM_FEATURES or sorted(set(layers)) != list(layers) or not layers[0] >= 0:
            raise ModelError(f"EAGLE-3 head: feature layers must be three ascending layers, got {list(layers)}")
        if layers[-1] >= num_target_layers:
            raise ModelError(f"EAGLE-3 head: reads layer {layers[-1]}, the target has {num_target_layers}")
        return layers


class _Attention(nn.Module):
    """Projections of the layer's attention: 2 H wide inputs."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        c, width = config.layer, 2 * config.hidden_size
        queries, keys = c.num_attention_heads * config.head_dim, c.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=c.attention_bias)
        self.k_proj = nn.Linear(width, keys, bias=c.attention_bias)
        self.v_proj = nn.Linear(width, keys, bias=c.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=c.attention_bias)


class _Layer(nn.Module):
    """Weights of the one layer, under the names of the authors' checkpoints."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.layer.rms_norm_eps
        self.self_attn = _Attention(config)
        self.mlp = LlamaMLP(config.layer)
        self.input_layernorm = LlamaRMSNorm(size, eps=epsilon)
        self.hidden_norm = LlamaRMSNorm(size, eps=epsilon)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=epsilon)


class Eagle3Head(nn.Module):
    """All weights of a head; how they are run is up to the caller (training unrolls, serving packs).

    `embedding` f[V, H] and `lm_head` f[Vd, H] may be the target's own; `target_ids` i64[Vd] maps draft ids.
    """

    def __init__(self, config: Eagle3Config, *, embedding: Tensor, lm_head: Tensor, target_ids: Tensor) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(NUM_FEATURES * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.layer.rms_norm_eps)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("lm_head", lm_head, persistent=False)
        self.register_buffer("target_ids", target_ids, persistent=False)
        self.embedding: Tensor
        self.lm_head: Tensor
        self.target_ids: Tensor

    def rotary(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [num_positions, head_dim]."""
        rotary = LlamaRotaryEmbedding(self.config.layer)
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(num_positions)[None])
        return cos[0].contiguous(), sin[0].contiguous()

    def layer_input(self, embedded: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, [..., 2 H], and the residual stream [..., H], of embeddings and g [..., H]."""
        normed = self.midlayer.hidden_norm(g)
        joined = torch.cat([self.midlayer.input_layernorm(embedded), normed], dim=-1)
        return joined, normed if self.config.norm_before_residual else g

    def layer_output(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output [..., H], of its residual stream and what attention mixed [..., Q * D]."""
        hidden = residual + self.midlayer.self_attn.o_proj(mixed)
        out: Tensor = hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))
        return out

    def logits(self, out: Tensor) -> Tensor:
        """[..., Vd]"""
        return nn.functional.linear(self.norm(out), self.lm_head)
