"""The slim verifier's model: the target without the layers that a mask leaves out (VIA-SD, arXiv 2606.12243).

In place it runs on the target's own weights, with no second copy; elsewhere only the kept layers are ever read from
the checkpoint. Either way it has KV rows of its own.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor

from serving.errors import ModelError
from serving.models.kv_store import KVStore, Row
from serving.models.memory_plan import MemoryPlan, PlannedItem, reserve
from serving.models.packed import Network
from serving.models.packed_lm import PackedLM
from serving.models.skipping import skip_layers
from serving.models.source import resolve_model
from serving.protocols import ScoreRequest
from serving.types import Ids, ScoreTable


def slim_in_place(target: PackedLM, kept: Sequence[int]) -> PackedLM:
    """The layers `kept` of `target` on the same weights, with KV rows of its own. Raises MemoryPlanError."""
    decoder, store = target.decoder.keeping(kept), target.store
    size = KVStore.planned_bytes(decoder.shapes, num_rows=store.all_rows, capacity=store.capacity, dtype=store.dtype)
    MemoryPlan.on(store.device, [PlannedItem("slim", "KV rows", size)]).check()
    own = KVStore(decoder.shapes, store.num_rows, store.capacity, store.dtype, store.device, has_flash=store.has_flash)
    reserve(own, "slim")
    return target.with_decoder(decoder, own, with_logsumexp=True)


def load_kept_network(model: str, kept: Collection[int], dtype: torch.dtype) -> Network:
    """A stock causal LM whose other layers are empty; of its safetensors only what is kept is read.

    Raises ModelError where the checkpoint is of another format or lacks a tensor.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = _checkpoint_folder(model)
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights(include_buffers=False):
        network: Network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    network = skip_layers(network, kept)
    names = [name for name, _ in network.named_parameters()]
    state = {name: tensor.to(dtype) for name, tensor in _read_tensors(folder, names)}
    head, embedding = _name_of(network, network.lm_head), _name_of(network, network.get_input_embeddings())
    if head not in state and embedding in state:  # tied: the checkpoint has it once
        state[head] = state[embedding]
    lacking = [name for name in names if name not in state]
    if lacking:
        raise ModelError(f"model {model!r}: its safetensors hold no {lacking[0]!r}, which a kept layer needs")
    network.load_state_dict(state, strict=False, assign=True)
    return network.eval().requires_grad_(False)


class SeededSlim:
    """A slim model whose rows start as copies of the full model's at the kept layers: no prefill of its own.

    In place only. The copies come from hidden states that passed every layer, so decisions may differ from those of
    a slim model that read the prompt itself: part of a profile.
    """

    def __init__(self, slim: PackedLM, full: PackedLM, kept: Sequence[int]) -> None:
        self._slim = slim
        self._full = full
        self._kept = list(kept)

    def open(self, session_id: str, ids: Ids, *, salt: str = "") -> int:
        """No prefix is shared: what a row holds of an earlier answer is the slim model's own, and may be gone."""
        return self._slim.open(session_id, ids[:0], salt=salt)

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreTable | None]:
        for request in requests:
            self._seed(request)
        return self._slim.score(requests)

    def rollback(self, session_id: str, length: int) -> None:
        self._slim.rollback(session_id, length)

    def close(self, session_id: str) -> None:
        self._slim.close(session_id)

    def _seed(self, request: ScoreRequest) -> None:
        """Copy what the full model has of the prompt and this one has not."""
        own, full = self._slim.store.row(request.session_id), self._full.store.row(request.session_id)
        prompt = request.ids[: request.prompt_len]
        held, known = own.shared_prefix(prompt), full.shared_prefix(prompt)
        if known > held:
            self._copy(full, own, held, known)

    def _copy(self, full: Row, own: Row, start: int, stop: int) -> None:
        ours, theirs = self._slim.store, self._full.store
        for slot, layer in enumerate(self._kept):
            for mine, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                mine[slot][own.index, :, start:stop].copy_(other[layer][full.index, :, start:stop])
        own.ids[start:stop] = full.ids[start:stop]
        own.length = stop


def _checkpoint_folder(model: str) -> Path:
    """Where the safetensors of `model` lie; those of a Hub id are fetched."""
    source = resolve_model(model)
    if source.gguf_file is not None:
        raise ModelError(
            f"model {model!r}: a slim verifier of its own reads safetensors, not GGUF; use `placement: colocated`"
        )
    if source.is_local:
        return Path(source.location)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source.location, allow_patterns=["*.safetensors", "*.json"]))
    except (OSError, ValueError) as error:
        raise ModelError(f"model {model!r} could not be fetched: {str(error).splitlines()[0]}") from None


def _read_tensors(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Those of `names` that the shards in `folder` hold; no other tensor is read."""
    with ExitStack() as stack:
        for path in sorted(folder.glob("*.safetensors")):
            shard: Any = stack.enter_context(safe_open(path, framework="pt"))
            held = set(shard.keys())
            for name in names:
                if name in held:
                    yield name, shard.get_tensor(name)


def _name_of(network: Network, module: Network) -> str:
    """The name of a module's weight."""
    return next(f"{name}.weight" for name, found in network.named_modules() if found is module)
