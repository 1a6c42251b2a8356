"""Lossy rules with the roles apart: strict at their limits, and a budget that no death refills."""

import asyncio
import signal
from dataclasses import replace

import pytest

from serving.requests import Tightening
from tests.cluster.application import Story, plainly, request, run_app
from tests.cluster.conftest import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]

LONG = 600
BUDGET = 20.0
ASD = {"kind": "asd", "budget": BUDGET, "gate": 100.0, "max_exceptions": 1}


@pytest.fixture(scope="module")
def asd_profile(profile_file, poor_model) -> str:
    drafter = {"kind": "model", "model": poor_model, "max_draft": 4}
    return profile_file("tiny-asd", drafter, rule=ASD, allow_uncertified=True)


@pytest.fixture(scope="module")
def expected(asd_profile):
    return plainly(asd_profile, request("plain", LONG))["plain"]


@pytest.fixture(scope="module")
def application(local_ray, asd_profile):
    application = run_app(asd_profile)
    wait_for(application.is_whole, what="the first lease")
    return application


@pytest.fixture(autouse=True)
def _starts_whole(application):
    wait_for(application.is_whole, timeout_s=120, what="recovery")


def tell(application, asked, *, then=lambda: None):
    """All chunks of a stream; something is done at the tenth."""

    async def consume():
        chunks = []
        async for chunk in application.client.generate(asked):
            chunks.append(chunk)
            if len(chunks) == 10:
                then()
        return chunks

    return asyncio.run(consume())


@pytest.mark.parametrize(
    "tightening",
    [Tightening(budget=0.0), Tightening(max_exceptions=0), Tightening(gate=0.0), Tightening(is_strict=True)],
    ids=["B=0", "M=0", "g=0", "strict"],
)
def test_ids_are_plain_decoding_s_where_nothing_may_be_accepted(application, expected, tightening):
    chunks = tell(application, replace(request(f"tight {tightening}", LONG), tightening=tightening))
    assert Story.of(chunks).result == expected
    assert chunks[-1].receipt.lossless
    assert 0 < chunks[-1].receipt.accepted < chunks[-1].receipt.drafted


@pytest.mark.parametrize("limit", [{"count_above": float("inf")}, {"count_above": -1.0, "min_ratio": 1.5}])
def test_csd_too(application, profile_file, poor_model, expected, limit):
    drafter = {"kind": "model", "model": poor_model, "max_draft": 4}
    csd = run_app(profile_file("tiny-csd", drafter, rule={"kind": "csd", **limit}), name="csd")
    wait_for(csd.is_whole, what="its lease")
    chunks = tell(csd, request("csd", LONG))
    assert Story.of(chunks).result == expected
    assert 0 < chunks[-1].receipt.accepted < chunks[-1].receipt.drafted


def check_account(chunks, expected):
    """The budget was spent to where it stood in the way, and no further; chunks tell every exception."""
    receipt, ids = chunks[-1].receipt, [token for chunk in chunks for token in chunk.ids]
    exceptions = [exception for chunk in chunks for exception in chunk.exceptions]
    assert receipt.exhausted_at is not None
    assert 0.0 < receipt.regret_spent == chunks[-1].ledger.regret_spent <= BUDGET
    assert receipt.regret_spent == sum(exception.regret for exception in exceptions)
    assert receipt.num_exceptions == len(exceptions) == chunks[-1].ledger.num_exceptions
    assert all(ids[exception.index] == exception.draft_id for exception in exceptions)
    assert ids != expected[0]
    assert not receipt.lossless


def test_an_undisturbed_stream_spends_its_budget(application, expected):
    check_account(tell(application, request("undisturbed", LONG)), expected)


def test_a_target_that_is_killed_in_mid_stream_refills_no_budget(application, expected, processes):
    def kill():
        processes.signal("ray::ServeReplica:drafthouse:Target", signal.SIGKILL)

    chunks = tell(application, request("target dies", LONG), then=kill)
    spent = [chunk.ledger.regret_spent for chunk in chunks]
    assert chunks[-1].receipt.resumed == 1
    assert spent == sorted(spent)
    assert spent[9] > 0.0  # something was spent before the death
    check_account(chunks, expected)
