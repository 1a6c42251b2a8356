"""EAGLE-3 draft heads (Li et al., arXiv 2503.01840): one decoder layer over the target's features.

H hidden size of the head, Ht of the target, F = 3 Ht features a position, V target vocabulary, Vd draft vocabulary. At
position p the layer reads `fc`(features of p), or its own output at p - 1 where the target has not been, together with
the embedding of the token at p + 1, and predicts the token at p + 2.

Checkpoints are read in two layouts: the authors' (`midlayer.*`) and that of the speculators library (`layers.0.*`). One of
our own is the authors', without the matrices that the target has: `eagle3.json` names the base model, the embedding is
the base's, and head rows are the base's rows of the draft vocabulary.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from serving.errors import ModelError
from serving.models.draft_lm import base_matrices
from serving.models.source import resolve_model

CARD = "eagle3.json"
_NUM_FEATURES = 3
_SPECULATORS = "speculators_model_type"
# What a config may say beyond the layer's own shape; anything else of the speculators layout is refused by name.
_KNOWN_SPECULATORS = frozenset({
    _SPECULATORS, "speculators_version", "speculators_config", "transformer_layer_config", "draft_vocab_size",
    "norm_before_residual", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "norm_before_fc", "fc_norm",
    "architectures", "torch_dtype", "dtype", "transformers_version", "tie_word_embeddings", "embed_requires_grad",
    "model_type", "auto_map", "has_no_defaults_at_init",
})  # fmt: skip
_UNSUPPORTED_FLAGS = ("norm_before_fc", "fc_norm")


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
        if len(layers) != _NUM_FEATURES or sorted(set(layers)) != list(layers) or not 0 <= layers[0]:
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
        self.fc = nn.Linear(_NUM_FEATURES * config.target_hidden_size, config.hidden_size, bias=False)
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


def is_eagle3(model: str) -> bool:
    """Whether `model` is an EAGLE-3 checkpoint: one of ours, or one whose config has a draft vocabulary."""
    path = Path(resolve_model(model).location) / "config.json"
    if not path.is_file():
        return False
    config = json.loads(path.read_text(encoding="utf-8"))
    return config.get(_SPECULATORS) == "eagle3" or "draft_vocab_size" in config


def read_eagle3_config(folder: Path) -> Eagle3Config:
    """The config of a checkpoint in either layout. Raises ModelError naming what is not supported."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"EAGLE-3 head {str(folder)!r}: config.json cannot be read: {error}") from None
    return _speculators_config(raw) if _SPECULATORS in raw else _authors_config(raw)


def load_eagle3(model: str, *, target: str, dtype: torch.dtype) -> Eagle3Head:
    """The head, with the target's embedding and head rows where the checkpoint has none of its own.

    Weights only: nothing pickled is run. Raises ModelError for unknown, missing or misshapen tensors, by name.
    """
    folder = Path(resolve_model(model).location)
    config = read_eagle3_config(folder)
    found = _read_tensors(folder)
    target_ids = _target_ids(found, config)
    found.pop("t2d", None)
    embedding, head = found.pop("embed_tokens.weight", None), found.pop("lm_head.weight", None)
    if embedding is None or head is None:
        base_embedding, base_head = base_matrices(target)
        embedding = base_embedding if embedding is None else embedding
        head = base_head[target_ids] if head is None else head
    _check_shape("embed_tokens.weight", embedding, (embedding.shape[0], config.hidden_size))
    _check_shape("lm_head.weight", head, (config.draft_vocab_size, config.hidden_size))
    if int(target_ids.max()) >= embedding.shape[0]:
        raise ModelError(f"tensor d2t: names token {int(target_ids.max())}, the target has {embedding.shape[0]}")
    with torch.device("meta"):
        empty = Eagle3Head(config, embedding=embedding, lm_head=head, target_ids=target_ids)
    expected = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
    for name in sorted(expected.keys() ^ found.keys()):
        raise ModelError(f"EAGLE-3 head {str(folder)!r}: tensor {name!r} is {'missing' if name in expected else 'unknown'}")
    for name, shape in expected.items():
        _check_shape(name, found[name], shape)
    empty.load_state_dict({name: tensor.to(dtype) for name, tensor in found.items()}, assign=True)
    empty.embedding, empty.lm_head = embedding.to(dtype), head.to(dtype)
    return empty.eval().requires_grad_(False)


def _authors_config(raw: dict[str, Any]) -> Eagle3Config:
    if "draft_vocab_size" not in raw:
        raise ModelError("EAGLE-3 head: config.json lacks draft_vocab_size")
    layer = _layer_config(raw)
    layers = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=int(raw["draft_vocab_size"]),
        target_hidden_size=int(raw.get("target_hidden_size") or layer.hidden_size),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        feature_layers=None if layers is None else tuple(layers),
    )


def _speculators_config(raw: dict[str, Any]) -> Eagle3Config:
    if raw[_SPECULATORS] != "eagle3":
        raise ModelError(f"EAGLE-3 head: {_SPECULATORS} must be 'eagle3', got {raw[_SPECULATORS]!r}")
    for key in sorted(raw.keys() - _KNOWN_SPECULATORS):
        raise ModelError(f"EAGLE-3 head: config key {key!r} is unknown, so its effect would be missing")
    for flag in _UNSUPPORTED_FLAGS:
        if raw.get(flag):
            raise ModelError(f"EAGLE-3 head: config says {flag}={raw[flag]!r}, which is not supported")
    layer = _layer_config(raw["transformer_layer_config"])
    layers = raw.get("eagle_aux_hidden_state_layer_ids")
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=int(raw["draft_vocab_size"]),
        target_hidden_size=int(raw.get("target_hidden_size") or layer.hidden_size),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        feature_layers=None if layers is None else tuple(layers),
    )


def _layer_config(raw: dict[str, Any]) -> LlamaConfig:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"EAGLE-3 head: hidden_act must be 'silu', got {activation!r}")
    if raw.get("num_hidden_layers", 1) != 1:
        raise ModelError(f"EAGLE-3 head: num_hidden_layers must be 1, got {raw['num_hidden_layers']}")
    if raw.get("mlp_bias"):
        raise ModelError("EAGLE-3 head: mlp_bias=true is not supported")
    known = {key: value for key, value in raw.items() if key not in ("architectures", "model_type", "auto_map")}
    return LlamaConfig(**known)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors under the authors' names; their draft ids are differences (`d2t`)."""
    shards = sorted(folder.glob("*.safetensors"))
    found: dict[str, Tensor] = {}
    for shard in shards:
        found |= load_file(shard)
    if not shards:
        pickled = folder / "pytorch_model.bin"
        if not pickled.is_file():
            raise ModelError(f"EAGLE-3 head {str(folder)!r}: holds neither *.safetensors nor pytorch_model.bin")
        found = torch.load(pickled, weights_only=True, map_location="cpu")
    return {_authors_name(name): tensor for name, tensor in found.items()}


def _authors_name(name: str) -> str:
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _target_ids(found: dict[str, Tensor], config: Eagle3Config) -> Tensor:
    """i64[Vd]; removes `d2t` from `found`."""
    if "d2t" not in found:
        raise ModelError("EAGLE-3 head: tensor 'd2t' is missing")
    differences = found.pop("d2t").long()
    _check_shape("d2t", differences, (config.draft_vocab_size,))
    return differences + torch.arange(config.draft_vocab_size)


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ModelError(f"EAGLE-3 head: tensor {name!r} has shape {list(tensor.shape)}, the config says {list(expected)}")


def card_of(folder: Path) -> Mapping[str, Any]:
    """What `train-eagle3` wrote about a head of ours; empty for others."""
    path = folder / CARD
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
