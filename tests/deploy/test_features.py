"""A drafter that reads the target's features drafts the same here and in another process."""

import numpy as np
import pytest
import torch

from serving.deploy.sync import SessionSync
from serving.deploy.table import DraftTable
from serving.drafters.model import ModelDrafter
from serving.models.shipped_features import ShippedFeatures
from serving.protocols import DraftRequest, FeatureRows
from serving.types import Draft, Ids
from tests.models.eagle_heads import TARGET_HIDDEN, tiny_head
from tests.models.test_eagle3 import KnownFeatures, features_of, make_lm, random_ids, runners

WIDTH = 3 * TARGET_HIDDEN


class RoundedFeatures(KnownFeatures):
    """What survives the way: bfloat16."""

    def features(self, session_id: str, ids: Ids, start: int) -> torch.Tensor:
        return super().features(session_id, ids, start).bfloat16()


def read(session_id: str, ids: Ids, start: int) -> FeatureRows:
    rows = features_of(ids)[start:].bfloat16()
    return FeatureRows(start, len(rows), rows.view(torch.int16).numpy().tobytes())


def drafter(features: object) -> ModelDrafter:
    head = tiny_head()
    return ModelDrafter(make_lm(head, runners(head)[-1], features), max_length=90, source="eagle3")  # type: ignore[arg-type]


def exchange(sync: SessionSync, table: DraftTable, requests: list[DraftRequest]) -> list[Draft]:
    calls = sync.prepare(requests)
    answers = [table.handle(call) for call in calls]
    return sync.absorb(calls[-1], answers[-1])


def test_drafts_with_shipped_features_are_those_of_a_drafter_beside_the_target() -> None:
    target, shipped = RoundedFeatures(), ShippedFeatures(WIDTH)
    here = drafter(target)
    table = DraftTable(drafter(shipped), "one", shipped)
    sync = SessionSync("target")
    sync.feed(read)
    sync.reset("one")
    texts = {"a": random_ids(60, 1), "b": random_ids(60, 2)}
    sizes = []
    for length in (8, 9, 13, 14, 40):
        requests = [DraftRequest(name, ids[:length], 5, 4) for name, ids in texts.items()]
        found = exchange(sync, table, requests)
        target.known = dict.fromkeys(texts, length - 1)
        expected = here.start(requests).result()
        sizes.append(max(len(draft) for draft in found))
        assert [draft.ids.tolist() for draft in found] == [draft.ids.tolist() for draft in expected]
    assert sizes == [4] * 5
    sync.close("a", None)
    found = exchange(sync, table, [DraftRequest("b", texts["b"][:41], 5, 4)])
    assert len(found[0]) == 4
    assert shipped.features("target/a", texts["a"], 0).shape == (0, WIDTH)


def test_another_process_gets_the_features_from_the_start() -> None:
    shipped = ShippedFeatures(WIDTH)
    sync, ids = SessionSync("target"), random_ids(60, 3)
    sync.feed(read)
    sync.reset("one")
    exchange(sync, DraftTable(drafter(shipped), "one", shipped), [DraftRequest("a", ids[:20], 5, 4)])
    fresh = ShippedFeatures(WIDTH)
    table = DraftTable(drafter(fresh), "two", fresh)
    sync.reset("two")
    found = exchange(sync, table, [DraftRequest("a", ids[:24], 5, 4)])
    target = RoundedFeatures()
    target.known["a"] = 23
    expected = drafter(target).start([DraftRequest("a", ids[:24], 5, 4)]).result()
    assert found[0].ids.tolist() == expected[0].ids.tolist()


def test_rows_that_would_leave_a_gap_are_dropped_and_repeated_rows_change_nothing() -> None:
    shipped, ids = ShippedFeatures(WIDTH), random_ids(30, 4)
    shipped.keep("s", read("s", ids[:10], 0))
    shipped.keep("s", read("s", ids[:20], 12))
    assert len(shipped.features("s", ids, 0)) == 10
    shipped.keep("s", read("s", ids[:15], 8))
    shipped.keep("s", read("s", ids[:15], 8))
    assert torch.equal(shipped.features("s", ids, 3), features_of(ids[:15])[3:].bfloat16())


@pytest.mark.parametrize("count", [1, 300])
def test_a_round_ships_two_bytes_a_number(count: int) -> None:
    rows = read("s", np.arange(count, dtype=np.int32), 0)
    assert len(rows.data) == 2 * WIDTH * count
