"""A stream goes on after its replica's death as if nothing had happened."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given
from ray.exceptions import ActorDiedError, ActorUnavailableError

from serving.deploy.failover import MAX_RESUMES, generate_with_failover
from serving.errors import OverloadedError, RequestError
from serving.types import Ledger
from tests.deploy.replicas import Replicas, chunks_of, request

PLAIN = "The quick brown fox jumps over the lazy dog."
EMOJI = "Grüße an Ωmega: 🦊🐶 und 漢字テスト, fertig 👩‍👩‍👧."


async def run(replicas, asked):
    return [chunk async for chunk in generate_with_failover(replicas, asked)]


def seen(chunks):
    """What a client keeps of a stream."""
    return "".join(c.text for c in chunks), [i for c in chunks for i in c.ids], chunks[-1].finish_reason


@pytest.mark.parametrize("text", [PLAIN, EMOJI])
@pytest.mark.parametrize("block", [0, 1, 5])
@pytest.mark.parametrize("stops", [(), ("never",), ("lazy", "fertig"), ("doz", "ferti!")])
async def test_whenever_it_dies_text_ids_and_end_are_the_same(text, block, stops):
    asked = request(text, stops=stops)
    undisturbed = chunks_of(asked, text, block)
    end = min((text.index(stop) for stop in stops if stop in text), default=len(text))
    assert seen(undisturbed)[0] == text[:end]
    for life in range(len(undisturbed)):
        chunks = await run(Replicas(text, block, [life]), asked)
        assert seen(chunks) == seen(undisturbed), life
        assert {c.request_id for c in chunks} == {"r"}


@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=3), st.integers(0, 20), st.data())
async def test_any_text_any_stop_any_block_two_deaths(text, stop, block, data):
    asked = request(text, stops=(stop,))
    undisturbed = chunks_of(asked, text, block)
    lives = data.draw(st.lists(st.integers(0, 20), max_size=2))
    assert seen(await run(Replicas(text, block, lives), asked)) == seen(undisturbed)


async def test_what_was_delivered_is_not_generated_again_and_the_ledger_goes_on():
    asked = request(PLAIN)
    replicas = Replicas(PLAIN, 4, [3, 2])
    chunks = await run(replicas, asked)
    first, second, third = replicas.requests
    assert (first.resume_ids.tolist(), first.receipt) == ([], None)
    assert second.resume_ids.tolist() == [i for c in chunks[:3] for i in c.ids]
    assert (second.ledger, second.receipt.resumed) == (chunks[2].ledger, 1)
    assert (third.receipt.resumed, third.ledger) == (2, chunks[4].ledger)
    last = chunks[-1]
    assert (last.receipt.resumed, last.receipt.emitted) == (2, len(PLAIN))
    assert last.ledger == Ledger(float(last.receipt.accepted), last.receipt.accepted)
    assert len({r.request_id for r in replicas.requests}) == 3


async def test_it_gives_up_after_the_second_resumption():
    replicas = Replicas(PLAIN, 0, [1, 1, 1, 1])
    with pytest.raises(ActorDiedError):
        await run(replicas, request(PLAIN))
    assert len(replicas.requests) == 1 + MAX_RESUMES


@pytest.mark.parametrize("error", [RequestError("prompt", "is empty"), OverloadedError("full"), ValueError()])
async def test_what_is_wrong_with_the_request_is_not_tried_again(error):
    calls = []

    async def refuse(asked):
        calls.append(asked)
        raise error
        yield

    with pytest.raises(type(error)):
        await run(refuse, request(PLAIN))
    assert len(calls) == 1


async def test_a_replica_out_of_reach_counts_as_dead():
    chunks = chunks_of(request(PLAIN), PLAIN, 0)
    calls = []

    async def call(asked):
        calls.append(asked)
        if len(calls) == 1:
            raise ActorUnavailableError("network", None)
        for chunk in chunks:
            yield chunk

    assert seen(await run(call, request(PLAIN))) == seen(chunks)


async def test_a_stream_that_just_ends_is_resumed():
    chunks = chunks_of(request(PLAIN), PLAIN, 0)
    calls = []

    async def call(asked):
        calls.append(asked)
        for chunk in chunks[len(asked.resume_ids) :][: 2 if len(calls) == 1 else None]:
            yield chunk

    assert seen(await run(call, request(PLAIN))) == seen(chunks)


async def test_a_client_that_leaves_closes_the_call():
    replicas = Replicas(PLAIN, 0, [])
    stream = generate_with_failover(replicas, request(PLAIN))
    await anext(stream)
    await stream.aclose()
    assert replicas.num_closed == 1


async def test_a_replica_that_takes_over_hears_of_every_divergence_that_was_delivered():
    chunks = [replace(chunk, seen=((i, 1),)) for i, chunk in enumerate(chunks_of(request(PLAIN), PLAIN, 0))]
    calls = []

    async def call(asked):
        calls.append(asked)
        for chunk in chunks[len(asked.resume_ids) :][: 3 if len(calls) < 3 else None]:
            yield chunk

    await run(call, request(PLAIN))
    assert [asked.resume_seen for asked in calls] == [tuple((i, 1) for i in range(n)) for n in (0, 3, 6)]
