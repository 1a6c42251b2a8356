"""The roles of one process against one machine: what an earlier one has planned and not touched is not free."""

import gc

import pytest
import torch

from serving.errors import MemoryPlanError
from serving.models.hf_decoder import HFDecoder
from serving.models.kv_store import KVShape, KVStore
from serving.models.memory_plan import MemoryPlan, PlannedItem, available_bytes, reserve
from serving.models.slim import slim_in_place
from serving.types import as_ids
from tests.models.test_packed_lm import make_lm
from tests.models.tiny import tiny_model

CPU = torch.device("cpu")


def large_rows(share: float) -> KVStore:
    """Two rows of `share` of this machine's memory, which are asked for and not touched."""
    shapes = [KVShape(8, 256)] * 4
    slot = KVStore.planned_bytes(shapes, num_rows=2, capacity=1, dtype=torch.float32)
    return KVStore(shapes, 2, int(share * available_bytes(CPU)) // slot, torch.float32)


def plan_for(rows: KVStore) -> MemoryPlan:
    return MemoryPlan.on(CPU, [PlannedItem("drafter", "KV rows", rows.untouched_bytes)])


def reserved_by(role: str) -> list[int]:
    gc.collect()
    return [i.num_bytes for i in MemoryPlan.on(CPU, ()).items if (i.role, i.purpose) == (role, "reserved")]


def test_case_27_two_roles_that_fit_singly_and_not_together_are_refused() -> None:
    target, drafter = large_rows(0.6), large_rows(0.6)
    plan_for(target).check()
    plan_for(drafter).check()
    reserve(target, "target")
    with pytest.raises(MemoryPlanError, match=r"(?s)target +reserved.*drafter +KV rows"):
        plan_for(drafter).check()
    del target
    gc.collect()
    plan_for(drafter).check()


def test_rows_that_were_used_are_the_machines_to_count() -> None:
    rows = large_rows(0.001)
    whole = rows.untouched_bytes
    reserve(rows, "one", workspace=1000)
    assert reserved_by("one") == [whole + 1000]
    rows.open("a", as_ids([]))
    assert reserved_by("one") == [whole // 2 + 1000]
    rows.close("a")
    assert reserved_by("one") == [whole // 2 + 1000]


def test_a_slim_model_in_place_reserves_its_rows() -> None:
    slim = slim_in_place(make_lm(HFDecoder(tiny_model("llama"))), (0, 2))
    assert slim.store.untouched_bytes in reserved_by("slim")
