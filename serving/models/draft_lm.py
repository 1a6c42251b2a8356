"""Draft LMs made by `train-drafter`: a few layers of their own, the target's embedding, rows of its head.

On disk: `config.json` (a Llama-like config with `num_hidden_layers` own layers), `draft.json` (base model, provenance,
measurements) and `model.safetensors` with the layers, the final norm and `target_ids` i32[Vd], the reduced
vocabulary in ascending order.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from serving.errors import ModelError
from serving.models.packed import Network
from serving.models.source import resolve_model

_CARD = "draft.json"


@dataclass(frozen=True)
class DraftModel:
    """A network whose head has Vd rows, and `id_map` i64[Vd] from its ids to the target's."""

    network: Network
    id_map: Tensor


def is_draft_lm(model: str) -> bool:
    """Whether `model` is a folder made by `train-drafter` (or a shipped one, by name)."""
    return (Path(resolve_model(model).location) / _CARD).is_file()


def draft_base(model: str) -> str:
    """The target that a draft LM was made for."""
    card = json.loads((Path(resolve_model(model).location) / _CARD).read_text(encoding="utf-8"))
    return str(card["base"])


def load_draft_model(model: str, dtype: torch.dtype) -> DraftModel:
    """Put the network together; of the base checkpoint only the embedding (and head) is read."""
    parts = _read_parts(model)
    network = _assemble(parts, parts.head[parts.target_ids], dtype)
    return DraftModel(network, parts.target_ids)


def load_whole_draft_lm(model: str, dtype: torch.dtype) -> Network:
    """The same layers under the base's whole head [V, H]: a stock causal LM that speaks the target's ids.

    For transformers' own assisted decoding, which knows no reduced vocabulary.
    """
    parts = _read_parts(model)
    return _assemble(parts, parts.head, dtype)


@dataclass(frozen=True)
class _Parts:
    """What `model`'s folder and its base checkpoint hold; `head` is `embedding` where they are tied."""

    folder: Path
    own: dict[str, Tensor]
    target_ids: Tensor
    embedding: Tensor
    head: Tensor


def _read_parts(model: str) -> _Parts:
    folder = Path(resolve_model(model).location)
    base = draft_base(model)
    own = load_file(folder / "model.safetensors")
    target_ids = own.pop("target_ids").long()
    return _Parts(folder, own, target_ids, *base_matrices(base))


def _assemble(parts: _Parts, head: Tensor, dtype: torch.dtype) -> Network:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(parts.folder))
    state = {name: tensor.to(dtype) for name, tensor in parts.own.items()}
    state["model.embed_tokens.weight"] = embedding = parts.embedding.to(dtype)
    state["lm_head.weight"] = embedding if head is parts.embedding else head.to(dtype)
    network.lm_head = torch.nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
    missing, unexpected = network.load_state_dict(state, strict=False, assign=True)
    if missing or unexpected:
        lacking = f"missing {missing[:3]}, unexpected {unexpected[:3]} tensors"
        raise ModelError(f"draft model {str(parts.folder)!r}: {lacking}")
    rotary = network.model.rotary_emb
    network.model.rotary_emb = type(rotary)(config=network.config)
    return network.eval().requires_grad_(False)


def base_matrices(base: str) -> tuple[Tensor, Tensor]:
    """Embedding and head [V, H] of a safetensors checkpoint; the same tensor where they are tied."""
    folder = Path(resolve_model(base).location)
    embedding = _find_tensor(folder, "model.embed_tokens.weight")
    if embedding is None:
        raise ModelError(f"base model {base!r} in {folder} has no tensor model.embed_tokens.weight")
    head = _find_tensor(folder, "lm_head.weight")
    return embedding, embedding if head is None else head


def _find_tensor(folder: Path, name: str) -> Tensor | None:
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                found: Tensor = tensors.get_tensor(name)
                return found
    return None
