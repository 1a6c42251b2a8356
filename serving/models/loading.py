"""From a model's name to a PackedLM: load, choose the decoder, plan the memory, warm up."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from serving.errors import ConfigError, ModelError
from serving.models.attention import PAGE, has_flash, may_flash
from serving.models.draft_lm import DraftModel, is_draft_lm, load_draft_model
from serving.models.graphs import CudaRecorder, GraphedDecoder
from serving.models.hf_decoder import HFDecoder, check_build, check_layers, layer_shapes
from serving.models.kv_store import KVStore
from serving.models.memory_plan import MemoryPlan, PlannedItem, reserve
from serving.models.native import load_native
from serving.models.native_decoder import NativeDecoder, supports
from serving.models.packed import LayeredDecoder, Network
from serving.models.packed_lm import HeadOptions, PackedLM
from serving.models.skipping import skip_layers
from serving.models.slim import load_kept_network
from serving.models.source import resolve_model

log = logging.getLogger(__name__)

# Logits of a step and the fused activations, in float32: rows that one pass may score or feed, at the least.
_WORKSPACE_ROWS = 64


@dataclass(frozen=True)
class LoadOptions:
    """`role` names the model in plans and errors; a sequence may have `max_length` tokens plus a draft in flight.

    Of each session one pass scores a draft's rows, and before them those of at most `max_unseen` tokens that earlier
    passes left out. What enters `feature_layers` (ascending) is kept beside the KV, for a drafter that reads it. Where
    `kept` names layers, no other layer is loaded. For `waits_for_prefixes` see PackedLM.
    """

    role: str
    dtype: str
    num_rows: int
    max_length: int
    prefill_chunk: int
    vocab_size: int
    max_draft: int = 0
    max_unseen: int = 0
    with_logsumexp: bool = False
    feature_layers: tuple[int, ...] = ()
    kept: tuple[int, ...] | None = None
    waits_for_prefixes: bool = False

    @property
    def capacity(self) -> int:
        """Slots of one KV row: the longest sequence, a draft behind it and one to spare; whole pages for flash."""
        slots = self.max_length + self.max_draft + 1
        return -(-slots // PAGE) * PAGE if self.may_flash else slots

    @property
    def kv_rows(self) -> int:
        """KV rows, with the one more that a store with flash attention has."""
        return self.num_rows + self.may_flash

    @property
    def may_flash(self) -> bool:
        """Whether flash attention is tried."""
        return may_flash(torch_dtype(self.dtype), default_device())

    @property
    def scored_rows(self) -> int:
        """Rows of logits that one pass may have to make for a session."""
        return min(self.capacity, self.max_unseen + self.max_draft + 1)


def load_packed_lm(model: str, options: LoadOptions) -> PackedLM:
    """Plan, load `model`, reserve its KV rows. Raises ModelError, ConfigError or MemoryPlanError, each one clear."""
    config, dtype = read_config(model), torch_dtype(options.dtype)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and options.max_length > limit:
        raise ConfigError(
            f"engine.max_length: {options.max_length} exceeds the {limit} positions that {model!r} was made for"
        )
    plan = plan_memory(config, options)
    log.info("%s %s:\n%s", options.role, model, plan)
    plan.check()
    draft = load_draft_model(model, dtype) if is_draft_lm(model) else None
    network = _network(model, options, draft)
    _check_vocabulary(network, options)
    decoder = _decoder(network, max_length=options.capacity)
    store = KVStore(
        decoder.shapes, options.num_rows, options.capacity, dtype, default_device(),
        feature_layers=options.feature_layers, hidden=config.get_text_config().hidden_size,
        has_flash=has_flash(decoder.shapes, options.capacity, dtype, default_device()),
    )  # fmt: skip
    is_capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)  # goes segment by segment
    if store.has_flash and not is_capped:
        decoder = GraphedDecoder(decoder, CudaRecorder())
    reserve(store, options.role, workspace=plan.bytes_for("workspace"))
    head = HeadOptions(
        vocab_size=min(options.vocab_size, network.lm_head.weight.shape[0]),
        id_map=None if draft is None else draft.id_map.to(default_device()),
        with_logsumexp=options.with_logsumexp,
    )
    return PackedLM(
        decoder, store, head=head,
        prefill_chunk=options.prefill_chunk, waits_for_prefixes=options.waits_for_prefixes,
    )  # fmt: skip


def _network(model: str, options: LoadOptions, draft: DraftModel | None) -> Network:
    if draft is not None:
        return draft.network.to(default_device())
    if options.kept is not None:
        return load_kept_network(model, options.kept, torch_dtype(options.dtype)).to(default_device())
    return load_network(model, torch_dtype(options.dtype))


def _check_vocabulary(network: Network, options: LoadOptions) -> None:
    """Every id that the tokenizer can give must have an embedding: a larger one would be read out of bounds."""
    num_embeddings = network.get_input_embeddings().weight.shape[0]
    if options.vocab_size > num_embeddings:
        raise ConfigError(
            f"{options.role}: its tokenizer has {options.vocab_size} tokens but the model has embeddings for "
            f"{num_embeddings}; resize the embeddings, or remove the tokens that were added"
        )


def skeleton_of(config: Network) -> Network:
    """The causal LM of `config` without weights, on the meta device. Raises ModelError."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ModelError(f"model type {config.model_type!r} is no causal LM here: {_first_line(error)}") from None


def plan_memory(config: Network, options: LoadOptions) -> MemoryPlan:
    """What the model of `config` will take, from its shapes alone: nothing is loaded for it."""
    dtype, skeleton = torch_dtype(options.dtype), skeleton_of(config)
    check_build(skeleton)
    if options.kept is not None:
        skip_layers(skeleton, options.kept)
    weights = sum(parameter.numel() for parameter in skeleton.parameters()) * dtype.itemsize
    kv_bytes = KVStore.planned_bytes(
        layer_shapes(skeleton), num_rows=options.kv_rows, capacity=options.capacity, dtype=dtype,
        feature_width=len(options.feature_layers) * config.get_text_config().hidden_size,
    )  # fmt: skip
    rows = max(_WORKSPACE_ROWS, options.num_rows * options.scored_rows)
    items = {"weights": weights, "KV rows": kv_bytes, "workspace": 4 * rows * options.vocab_size}
    planned = (PlannedItem(options.role, purpose, size) for purpose, size in items.items())
    return MemoryPlan.on(default_device(), planned)


def read_config(model: str) -> Network:
    """The config of `model`, whose layers are all of kinds that can be rolled back. Raises ModelError."""
    from transformers import AutoConfig

    source = resolve_model(model)
    options = {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
    try:
        config = AutoConfig.from_pretrained(source.location, **options)
    except (OSError, ValueError, KeyError) as error:
        raise _load_error(model, error) from None
    check_layers(config)
    return config


def load_network(model: str, dtype: torch.dtype) -> Network:
    """The stock Hugging Face causal LM, in eval mode, on the GPU if there is one. Never runs remote code."""
    from transformers import AutoModelForCausalLM, GgufConfig

    source = resolve_model(model)
    options: dict[str, Any] = {}
    if source.gguf_file is not None:
        options = {"gguf_file": source.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    try:
        with _quiet_transformers():
            network = AutoModelForCausalLM.from_pretrained(source.location, dtype=dtype, **options)
    except (OSError, ValueError, KeyError) as error:
        raise _load_error(model, error) from None
    return network.to(default_device()).eval().requires_grad_(False)


def _load_error(model: str, error: Exception) -> ModelError:
    return ModelError(f"model {model!r} could not be loaded: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def default_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _decoder(network: Network, *, max_length: int) -> LayeredDecoder:
    kernels = load_native()
    if kernels is not None and supports(network, kernels):
        return NativeDecoder(network, kernels, max_length=max_length)
    return HFDecoder(network)


def torch_dtype(name: str) -> torch.dtype:
    """By the name that profiles use."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice from the library while it loads."""
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        hf_logging.enable_progress_bar()
