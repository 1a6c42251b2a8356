"""What a request says about sampling and stopping reaches the engine as it was said."""

import pytest

from serving.api.sampling import SEED_STEP, choice_seed
from serving.requests import Limits, Sampling
from tests.api.scripted import ScriptedBackend, chat_body, http_client, openai_client, text_body

BODIES = [("chat/completions", chat_body), ("completions", text_body)]


async def asked(route, body, **fields):
    """The engine's requests for one HTTP request."""
    backend = ScriptedBackend()
    async with http_client(backend) as client:
        response = await client.post(f"/v1/{route}", json=body(**fields))
    assert response.status_code == 200, response.text
    return backend.requests


SAMPLINGS = [
    ({}, Sampling()),
    ({"temperature": 0.7}, Sampling(temperature=0.7)),
    ({"temperature": 2}, Sampling(temperature=2.0)),
    ({"top_p": 0.9}, Sampling(top_p=0.9)),
    ({"top_k": 40}, Sampling(top_k=40)),
    ({"top_k": -1}, Sampling(top_k=0)),
    ({"min_p": 0.05}, Sampling(min_p=0.05)),
    ({"logit_bias": {"200": 5, "7": -100}}, Sampling(logit_bias=((7, -100.0), (200, 5.0)))),
    ({"min_tokens": 3}, Sampling(min_tokens=3, held_ids=(0,))),
    ({"min_tokens": 3, "stop_token_ids": [9, 4]}, Sampling(min_tokens=3, held_ids=(0, 4, 9))),
    ({"min_tokens": 3, "ignore_eos": True, "stop_token_ids": [9]}, Sampling(min_tokens=3, held_ids=(9,))),
    ({"seed": -5}, Sampling(seed=-5)),
]


@pytest.mark.parametrize(("route", "body"), BODIES)
@pytest.mark.parametrize(("fields", "expected"), SAMPLINGS)
async def test_sampling_parameters_reach_the_engine(route, body, fields, expected):
    (request,) = await asked(route, body, **{"seed": 0} | fields)
    assert request.sampling == expected


@pytest.mark.parametrize(("route", "body"), BODIES)
@pytest.mark.parametrize("penalty", [2.0, -2.0, 0.5])
@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
async def test_penalties_reach_the_engine_case_17(route, body, name, penalty):
    (request,) = await asked(route, body, seed=0, **{name: penalty})
    assert request.sampling == Sampling(**{name: penalty})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Limits(9, frozenset({0}))),
        ({"ignore_eos": True}, Limits(9)),
        ({"stop_token_ids": [5]}, Limits(9, frozenset({0, 5}))),
        ({"stop_token_ids": [5], "ignore_eos": True}, Limits(9, frozenset({5}))),
        ({"min_tokens": 9, "stop": "x"}, Limits(9, frozenset({0}), ("x",), min_tokens=9)),
    ],
)
async def test_what_ends_an_answer(fields, expected):
    (request,) = await asked("completions", text_body, max_tokens=9, **fields)
    assert request.limits == expected


async def test_requests_without_a_seed_have_different_ones():
    seeds = {(await asked("completions", text_body, temperature=1))[0].sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_choices_are_seeded_by_the_request_s_seed_and_their_number():
    requests = await asked("chat/completions", chat_body, seed=7, n=3)
    assert [request.sampling.seed for request in requests] == [choice_seed(7, choice) for choice in range(3)]


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63)])
def test_a_choice_s_seed_is_a_signed_64_bit_number_and_choice_0_has_the_seed_itself(seed):
    seeds = [choice_seed(seed, choice) for choice in range(16)]
    assert seeds[0] == seed
    assert all(-(2**63) <= choice < 2**63 for choice in seeds)
    assert all((later - seed - number * SEED_STEP) % 2**64 == 0 for number, later in enumerate(seeds))


def test_neighbouring_seeds_share_no_choice():
    seeds = [choice_seed(seed, choice) for seed in range(100) for choice in range(16)]
    assert len(set(seeds)) == len(seeds)


async def test_each_prompt_of_a_list_is_seeded_as_if_it_came_alone():
    requests = await asked("completions", text_body, prompt=["a", "b"], n=2, seed=3)
    assert [request.sampling.seed for request in requests] == [3, choice_seed(3, 1)] * 2
    drawn = {request.sampling.seed for request in await asked("completions", text_body, prompt=["a", "a"], n=2)}
    assert len(drawn) == 4


async def test_the_official_client_s_own_parameters():
    backend = ScriptedBackend()
    await openai_client(backend).chat.completions.create(
        **chat_body(temperature=0.5, top_p=0.9, seed=1, presence_penalty=1, frequency_penalty=-1, logit_bias={"7": 2}),
        extra_body={"top_k": 5, "min_p": 0.1},
    )
    expected = Sampling(
        temperature=0.5, seed=1, top_p=0.9, top_k=5, min_p=0.1, frequency_penalty=-1.0, presence_penalty=1.0,
        logit_bias=((7, 2.0),),
    )  # fmt: skip
    assert backend.requests[0].sampling == expected
