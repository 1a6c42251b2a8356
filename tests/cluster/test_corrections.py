"""An online memory shared by two Targets: what one has met nominates at the other, and it is kept on disk."""

import asyncio
import time

import pytest

from serving.deploy.correction_actor import PERIOD_S
from serving.deploy.options import Scaling
from tests.cluster.application import request, run_app
from tests.cluster.conftest import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]

RULE = {"kind": "csd", "memory": "online", "count_above": 1.0, "min_ratio": 0.0}


def receipt_of(application, name, max_tokens):
    async def consume():
        return [chunk async for chunk in application.client.generate(request(name, max_tokens))]

    return asyncio.run(consume())[-1].receipt


def test_what_one_target_meets_nominates_at_the_other(local_ray, profile_file, poor_model, tmp_path):
    store = tmp_path / "counts.parquet"
    drafter = {"kind": "model", "model": poor_model, "max_draft": 4}
    path = profile_file("online", drafter, rule=RULE | {"store": str(store)}, allow_uncertified=True)
    application = run_app(path, target=Scaling(num_cpus=0.5, min_replicas=2, max_replicas=2))
    wait_for(application.is_whole, what="the first lease")
    first = receipt_of(application, "first", 100)
    assert first.memory == "empty+empty"
    wait_for(store.is_file, what="a saved memory")
    time.sleep(3 * PERIOD_S)  # both have heard of it
    assert "empty+empty" not in {receipt_of(application, f"later {i}", 8).memory for i in range(8)}
    assert receipt_of(application, "again", 100).rescues > first.rescues
