"""What a request may ask of a lossy profile, and what its receipt tells."""

from dataclasses import replace

import pytest
from openai import BadRequestError

from serving.config import Profile, SuffixDrafter
from serving.config_rules import AsdRule, CsdRule
from serving.requests import Receipt, SlimReceipt, Tightening
from serving.types import ExceptionRecord
from tests.api.scripted import PROFILE, ScriptedBackend, chat_body, chunk, http_client, openai_client

ASD = Profile(
    name="tiny-asd", drafter=SuffixDrafter(max_draft=8), engine=PROFILE.engine,
    rule=AsdRule(budget=4.0, gate=0.5, max_exceptions=2),
)  # fmt: skip
CSD = ASD.model_copy(update={"name": "tiny-csd", "rule": CsdRule()})


async def ask(profile=ASD, speculation=None, **fields):
    backend = ScriptedBackend(profile=profile)
    extra = {"speculation": speculation}
    await openai_client(backend).chat.completions.create(**chat_body(**fields), extra_body=extra)
    return backend.requests[0]


async def refused(profile=ASD, speculation=None, **fields):
    with pytest.raises(BadRequestError) as caught:
        await ask(profile, speculation, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("speculation", "tightening"),
    [
        (None, Tightening()),
        ({"mode": "strict"}, Tightening(is_strict=True)),
        ({"mode": "off"}, Tightening(is_strict=True)),
        ({"budget": 4}, Tightening(budget=4.0)),
        ({"budget": 0, "gate": 0.25, "max_exceptions": 1}, Tightening(budget=0.0, gate=0.25, max_exceptions=1)),
        ({"max_exceptions": 0}, Tightening(max_exceptions=0)),
        (dict.fromkeys(["mode", "max_draft", "budget", "gate", "max_exceptions", "detail"]), Tightening()),
        ({"mode": None, "budget": 1}, Tightening(budget=1.0)),
    ],
)
async def test_a_request_may_tighten(speculation, tightening):
    assert (await ask(speculation=speculation)).tightening == tightening


@pytest.mark.parametrize(
    ("name", "value", "limit"), [("budget", 4.5, "4"), ("gate", 0.75, "0.5"), ("max_exceptions", 3, "2")]
)
async def test_a_request_may_not_loosen(name, value, limit):
    error = await refused(speculation={name: value})
    assert error.param == f"speculation.{name}"
    assert f"is {value}, but a request may only lower the profile's {limit}" in error.message


async def test_a_budget_is_refused_where_nothing_is_charged():
    error = await refused(CSD, {"budget": 1.0})
    assert error.param == "speculation.budget"
    assert (
        """has no effect under rule 'csd' of this profile; leave it out, or send {"mode": "strict"}""" in error.message
    )


@pytest.mark.parametrize("profile", [ASD, CSD])
async def test_a_lossy_rule_refuses_to_sample_and_says_what_will_do(profile):
    error = await refused(profile, temperature=0.7)
    assert error.param == "temperature"
    assert "greedy decoding only" in error.message
    assert (await ask(profile, {"mode": "strict"}, temperature=0.7)).sampling.temperature == 0.7


async def test_a_lossy_rule_with_nothing_to_spend_samples():
    assert (await ask(speculation={"budget": 0}, temperature=0.7)).tightening.budget == 0.0


EXCEPTION = ExceptionRecord(index=1, draft_id=ord("b"), target_id=0, regret=0.125, count=7)
LOSSY = Receipt(lossless=False, budget=4.0, regret_spent=0.125, num_exceptions=1, profile="0123456789abcdef")
SCRIPT = (
    chunk("a", 97, tiers=("recovered",)),
    replace(chunk("b", 98, tiers=("exception",), exceptions=(EXCEPTION,), finish_reason="stop"), receipt=LOSSY),
)
ONLY_LOSSY = {
    "budget": 4.0, "regret_spent": 0.125, "regret_left": 3.875, "num_exceptions": 1, "rescues": 0, "exhausted_at": None,
    "profile": "0123456789abcdef", "memory": "",
}  # fmt: skip


@pytest.mark.parametrize("detail", [False, True])
async def test_the_receipt_lists_every_exception_and_tiers_on_request(detail):
    backend = ScriptedBackend(script=SCRIPT, profile=ASD)
    body = chat_body(speculation={"detail": detail})
    receipt = (await http_client(backend).post("/v1/chat/completions", json=body)).json()["speculation"]
    assert receipt["exceptions"] == [
        {
            "position": 1, "draft_token": "b", "draft_id": 98, "target_token": "<end>", "target_id": 0,
            "regret": 0.125, "count": 7,
        }
    ]  # fmt: skip
    assert {name: receipt[name] for name in ONLY_LOSSY} == ONLY_LOSSY
    assert receipt.get("tiers") == (["recovered", "exception"] if detail else None)
    assert backend.requests[0].wants_tiers is detail


def test_a_lossless_receipt_tells_of_no_exceptions_and_one_without_a_slim_verifier_of_none():
    lossless, lossy = Receipt().shown, Receipt(lossless=False, slim=SlimReceipt()).shown
    assert set(lossy) - set(lossless) == {*ONLY_LOSSY, "slim"}
    assert lossless["acceptance_rate"] is None
    assert Receipt(drafted=4, accepted=1).shown["acceptance_rate"] == 0.25


def test_what_is_left_of_a_budget():
    assert Receipt(budget=8.0, regret_spent=3.0).regret_left == 5.0
    assert Receipt(budget=None, regret_spent=3.0).regret_left is None
