"""EAGLE-3 checkpoints: from a folder to an `Eagle3Head`.

They come in two layouts: the authors' (`midlayer.*`) and that of the speculators library (`layers.0.*`). Our own
are the authors', without what the target has: the embedding is the target's, and so are the head's rows.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from serving.errors import ModelError
from serving.models.draft_lm import base_matrices
from serving.models.eagle3 import Eagle3Config, Eagle3Head
from serving.models.source import resolve_model

CARD = "eagle3.json"
_SPECULATORS = "speculators_model_type"
# What a config may say beyond the layer's own shape; anything else is refused by name.
_KNOWN_SPECULATORS = frozenset({
    _SPECULATORS, "speculators_version", "speculators_config", "transformer_layer_config", "draft_vocab_size",
    "norm_before_residual", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "norm_before_fc", "fc_norm",
    "architectures", "torch_dtype", "dtype", "transformers_version", "tie_word_embeddings", "embed_requires_grad",
    "model_type", "auto_map", "has_no_defaults_at_init",
})  # fmt: skip
_KNOWN_AUTHORS = frozenset(LlamaConfig().to_dict()) | {
    "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "eagle_config",
    "rope_scaling", "rope_theta", "torch_dtype", "auto_map",
    "sliding_window", "use_sliding_window", "max_window_layers",
}  # fmt: skip
_UNSUPPORTED_FLAGS = ("norm_before_fc", "fc_norm")
# What the part `eagle_config` may say: the head as it is here, or, of None, anything.
_EAGLE_CONFIG: dict[str, tuple[Any, ...] | None] = {
    "eagle_aux_hidden_state_layer_ids": None,
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (0, 1),
    "parallel_draft_heads_num_layers": (0,),
    "norm_before_fc": (False,),
    "fc_norm": (False,),
}


def is_eagle3(model: str) -> bool:
    """Whether `model` is an EAGLE-3 checkpoint: one of ours, or one whose config has a draft vocabulary."""
    path = Path(resolve_model(model).location) / "config.json"
    if not path.is_file():
        return False
    config = json.loads(path.read_text(encoding="utf-8"))
    return config.get(_SPECULATORS) == "eagle3" or "draft_vocab_size" in config


def read_eagle3_config(model: str) -> Eagle3Config:
    """The config of a checkpoint in either layout. Raises ModelError naming what is not supported."""
    folder = Path(resolve_model(model).location)
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
    config = read_eagle3_config(model)
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
        raise ModelError(
            f"EAGLE-3 head {str(folder)!r}: tensor {name!r} is {'missing' if name in expected else 'unknown'}"
        )
    for name, shape in expected.items():
        _check_shape(name, found[name], shape)
    empty.load_state_dict({name: tensor.to(dtype) for name, tensor in found.items()}, assign=True)
    empty.embedding, empty.lm_head = embedding.to(dtype), head.to(dtype)
    return empty.eval().requires_grad_(False)


def _authors_config(raw: dict[str, Any]) -> Eagle3Config:
    if "draft_vocab_size" not in raw:
        raise ModelError("EAGLE-3 head: config.json lacks draft_vocab_size")
    _check_keys(raw, _KNOWN_AUTHORS)
    details = raw.get("eagle_config") or {}
    _check_details(details)
    layer = _layer_config(raw)
    layers = details.get("eagle_aux_hidden_state_layer_ids")
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
    _check_keys(raw, _KNOWN_SPECULATORS)
    layer = _layer_config(raw["transformer_layer_config"])
    layers = raw.get("eagle_aux_hidden_state_layer_ids")
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=int(raw["draft_vocab_size"]),
        target_hidden_size=int(raw.get("target_hidden_size") or layer.hidden_size),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        feature_layers=None if layers is None else tuple(layers),
    )


def _check_keys(raw: dict[str, Any], known: frozenset[str]) -> None:
    for key in sorted(raw.keys() - known):
        raise ModelError(f"EAGLE-3 head: config key {key!r} is unknown, so its effect would be missing")
    for flag in _UNSUPPORTED_FLAGS:
        if raw.get(flag):
            raise ModelError(f"EAGLE-3 head: config says {flag}={raw[flag]!r}, which is not supported")


def _check_details(details: dict[str, Any]) -> None:
    """Of `eagle_config`; what it leaves open (null) is as it is here."""
    for key, value in sorted(details.items()):
        name = f"eagle_config.{key}"
        if key not in _EAGLE_CONFIG:
            raise ModelError(f"EAGLE-3 head: config key {name!r} is unknown, so its effect would be missing")
        allowed = _EAGLE_CONFIG[key]
        if allowed is not None and value is not None and value not in allowed:
            raise ModelError(f"EAGLE-3 head: config says {name}={value!r}, which is not supported")


def _layer_config(raw: dict[str, Any]) -> LlamaConfig:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"EAGLE-3 head: hidden_act must be 'silu', got {activation!r}")
    if raw.get("num_hidden_layers", 1) != 1:
        raise ModelError(f"EAGLE-3 head: num_hidden_layers must be 1, got {raw['num_hidden_layers']}")
    if raw.get("mlp_bias"):
        raise ModelError("EAGLE-3 head: mlp_bias=true is not supported")
    if raw.get("sliding_window") and raw.get("use_sliding_window", True):
        raise ModelError(f"EAGLE-3 head: config says sliding_window={raw['sliding_window']!r}, which is not supported")
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
        raise ModelError(
            f"EAGLE-3 head: tensor {name!r} has shape {list(tensor.shape)}, the config says {list(expected)}"
        )
