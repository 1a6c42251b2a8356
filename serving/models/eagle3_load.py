"""Loads an EAGLE-3 head as a drafting model: its memory planned, its first call made."""

import logging
from functools import partial

import torch
from torch import Tensor

from serving.models.attention import has_flash
from serving.models.eagle3 import NUM_FEATURES
from serving.models.eagle3_checkpoint import load_eagle3
from serving.models.eagle3_lm import KEPT, Eagle3LM, FeatureSource
from serving.models.eagle3_runner import kv_shape, runner_of
from serving.models.kv_store import KVStore
from serving.models.loading import LoadOptions, default_device, torch_dtype
from serving.models.memory_plan import MemoryPlan, PlannedItem, reserve
from serving.models.packed import CATCH_UP
from serving.protocols import ScoreRequest
from serving.types import Ids, as_ids

log = logging.getLogger(__name__)

_WARM_UP = CATCH_UP  # positions: a prompt that is read in one call whatever the chunk


def load_eagle3_lm(model: str, *, target: str, features: FeatureSource, options: LoadOptions) -> Eagle3LM:
    """Load the head `model` for `target`, reserve its KV rows. Raises ModelError or MemoryPlanError, each one clear."""
    dtype, device = torch_dtype(options.dtype), default_device()
    head = load_eagle3(model, target=target, dtype=dtype).to(device)
    shape = kv_shape(head)
    matrices = (*head.parameters(), *head.buffers())
    plan = MemoryPlan.on(
        device,
        [
            PlannedItem(options.role, "weights", sum(matrix.nbytes for matrix in matrices)),
            PlannedItem(options.role, "KV rows", KVStore.planned_bytes(
                [shape], num_rows=options.kv_rows, capacity=options.capacity, dtype=dtype
            )),
            PlannedItem(options.role, "kept outputs", 4 * options.num_rows * KEPT * head.config.hidden_size),
        ],
    )  # fmt: skip
    log.info("%s %s:\n%s", options.role, model, plan)
    plan.check()
    store = KVStore(
        [shape], options.num_rows, options.capacity, dtype, device,
        has_flash=has_flash([shape], options.capacity, dtype, device),
    )  # fmt: skip
    reserve(store, options.role)
    lm_with = partial(
        Eagle3LM, runner_of(head, max_length=options.capacity), store,
        target_ids=head.target_ids.to(device), hidden=head.config.hidden_size,
        prefill_chunk=options.prefill_chunk, with_logsumexp=options.with_logsumexp,
    )  # fmt: skip
    _warm_up(lm_with(features=_NoTarget(NUM_FEATURES * head.config.target_hidden_size)), options.capacity)
    return lm_with(features=features)


class _NoTarget:
    """Features that say nothing, of any text."""

    def __init__(self, width: int) -> None:
        self._width = width

    def features(self, session_id: str, ids: Ids, start: int) -> Tensor:
        return torch.zeros(len(ids) - start, self._width)


def _warm_up(lm: Eagle3LM, capacity: int) -> None:
    """Read a prompt and take one step, so that the first request does not pay for what happens once."""
    ids = as_ids([1] * min(_WARM_UP, capacity))
    lm.open("warm-up", ids)
    for length in (len(ids) - 1, len(ids)):
        lm.score([ScoreRequest("warm-up", ids[:length])])
    lm.close("warm-up")
