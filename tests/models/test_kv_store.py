"""Rows: rollback past any edge, prefixes by salt, least recently used first."""

import time

import numpy as np
import pytest
import torch

from serving.models.kv_store import KVShape, KVStore
from serving.types import Ids, as_ids


def store(num_rows: int = 2) -> KVStore:
    return KVStore([KVShape(1, 4)] * 2, num_rows, 64, torch.float32)


def fill(kv: KVStore, session: str, ids: Ids) -> None:
    row = kv.row(session)
    row.ids[: len(ids)] = ids
    row.length = len(ids)


@pytest.mark.parametrize(("length", "to", "expected"), [(5, 3, 3), (5, 0, 0), (0, 0, 0), (5, -2, 0), (5, 9, 5)])
def test_case_12_rollback_at_every_edge(length: int, to: int, expected: int) -> None:
    kv = store()
    kv.open("a", as_ids([]))
    fill(kv, "a", as_ids(list(range(length))))
    kv.rollback("a", to)
    assert kv.row("a").length == expected
    kv.check_integrity()


def test_a_row_knows_what_is_valid_for_a_changed_text() -> None:
    kv = store()
    kv.open("a", as_ids([]))
    fill(kv, "a", as_ids([1, 2, 3, 4]))
    assert kv.row("a").shared_prefix(as_ids([1, 2, 9, 4])) == 2
    assert kv.row("a").shared_prefix(as_ids([9])) == 0
    assert kv.row("a").shared_prefix(as_ids([1, 2, 3, 4, 5])) == 4


def test_no_free_row_is_an_error_and_a_closed_one_is_free() -> None:
    kv = store(num_rows=1)
    kv.open("a", as_ids([1]))
    with pytest.raises(KeyError, match="no free KV row"):
        kv.open("b", as_ids([1]))
    kv.close("a")
    kv.close("a")
    kv.open("b", as_ids([1]))
    assert kv.num_open == 1


def test_the_row_used_longest_ago_is_overwritten_first() -> None:
    kv = store(num_rows=2)
    texts = [np.arange(start, start + 20, dtype=np.int32) for start in (0, 100, 200)]
    for name, ids in zip("ab", texts[:2], strict=True):
        kv.open(name, ids)
        fill(kv, name, ids)
    kv.close("a")
    kv.close("b")
    kv.open("c", texts[2])
    kv.close("c")
    assert kv.open("again", texts[1]) == 20
    kv.close("again")
    assert kv.open("gone", texts[0]) == 0


def test_features_go_to_their_slots_layer_by_layer() -> None:
    kv = KVStore([KVShape(2, 4)], 3, 8, torch.float32, feature_layers=(0, 1), hidden=2)
    kv.features.zero_()
    inputs = torch.arange(12.0).view(2, 3, 2)
    kv.keep_features(torch.tensor([2, 0, 2]), torch.tensor([5, 1, 6]), inputs)
    assert kv.features[2, 5].tolist() == [0, 1, 6, 7]
    assert kv.features[0, 1].tolist() == [2, 3, 8, 9]
    assert kv.features[2, 6].tolist() == [4, 5, 10, 11]
    assert int(kv.features.count_nonzero()) == 11


def test_keeping_features_leaves_no_thread_spinning() -> None:
    """OpenMP's threads look for more work for milliseconds, on the cores that the next kernel wants."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        kv = KVStore([KVShape(2, 4)], 4, 64, torch.bfloat16, feature_layers=(0, 1, 2), hidden=576)
        at, inputs, spent = torch.arange(32), torch.ones(3, 32, 576), []
        for _ in range(5):  # the best of five: other threads of this process may have something to do
            time.sleep(0.02)
            kv.keep_features(at % 4, at // 4, inputs)
            began = time.process_time()
            time.sleep(0.02)
            spent.append(time.process_time() - began)
    finally:
        torch.set_num_threads(threads)
    assert min(spent) < 0.003
