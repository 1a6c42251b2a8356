"""A stream seen from a Gateway: Serve's call is faked, the channel beside it is real."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError

from serving.deploy.outlets import Outlets
from serving.deploy.target import TargetReplica
from serving.deploy.target_client import TargetClient
from serving.errors import OverloadedError, RequestError
from tests.deploy.replicas import chunks_of, request

TEXT = "The quick brown fox jumps over the lazy dog."


class TextEngine:
    """Says TEXT from a thread of its own, at most `life` chunks of it."""

    def __init__(self, life):
        self._life = life
        self.requests, self.cancelled = [], []

    def submit(self, asked, sink):
        self.requests.append(asked)
        chunks = chunks_of(asked, TEXT, 0)[: self._life]
        threading.Thread(target=lambda: [sink(chunk) for chunk in chunks]).start()

    def cancel(self, request_id):
        self.cancelled.append(request_id)


class Call:
    """What Serve returns for a streaming call; the replica's generator runs in a task of its own."""

    def __init__(self, generator):
        self._items = asyncio.Queue()
        self._task = asyncio.create_task(self._run(generator))

    async def _run(self, generator):
        try:
            async for item in generator:
                self._items.put_nowait((item, None))
            self._items.put_nowait((None, StopAsyncIteration()))
        except BaseException as error:
            self._items.put_nowait((None, error))
            raise

    def __aiter__(self):
        return self

    async def __anext__(self):
        item, error = await self._items.get()
        if error is not None:
            raise error
        return item

    def cancel(self):
        self._task.cancel()

    def fail(self, error):
        self._task.cancel()
        self._items.put_nowait((None, error))


class Replica:
    """A Target without a model; `life` is how many chunks it gives."""

    def __init__(self, life=None):
        self.engine = TextEngine(life)
        self.calls = []
        self.outlets = Outlets("127.0.0.1")

    def generate(self, asked, gateway):
        me = SimpleNamespace(_engine=self.engine, _outlets=self.outlets)
        self.calls.append(Call(TargetReplica.generate(me, asked, gateway)))
        return self.calls[-1]


class Refusal:
    """A replica, or Serve before it, that answers every call with `error`; with None by silence."""

    def __init__(self, error):
        self._error = error

    def generate(self, asked, gateway):
        async def refuse():
            if self._error is not None:
                raise self._error
            return
            yield

        return Call(refuse())


def client(*replicas):
    """Serve as a handle sees it: each call goes to the next replica, the last one takes the rest."""
    order = [*replicas]

    def remote(asked, gateway):
        return (order.pop(0) if len(order) > 1 else order[0]).generate(asked, gateway)

    return TargetClient(
        SimpleNamespace(options=lambda stream: SimpleNamespace(generate=SimpleNamespace(remote=remote)))
    )


async def answer(stream):
    chunks = [chunk async for chunk in stream]
    return "".join(chunk.text for chunk in chunks), chunks[-1].receipt.resumed, chunks[-1].finish_reason


pytestmark = pytest.mark.usefixtures("tidy_loop")


async def test_an_answer_is_whole_and_its_call_is_over():
    replica = Replica()
    gateway = client(replica)
    assert await answer(gateway.generate(request(TEXT))) == (TEXT, 0, "length")
    assert replica.engine.cancelled == []


async def test_streams_side_by_side_share_the_channel():
    replica = Replica()
    gateway = client(replica)
    asked = [request(TEXT, name=str(number)) for number in range(8)]
    assert await asyncio.gather(*(answer(gateway.generate(one)) for one in asked)) == [(TEXT, 0, "length")] * 8


@pytest.mark.parametrize(
    "lose",
    [
        pytest.param(lambda replica: replica.outlets.close(), id="its process is gone"),
        pytest.param(lambda replica: replica.calls[0].fail(ActorDiedError()), id="its call fails"),
        pytest.param(lambda replica: replica.calls[0].cancel(), id="it cancels the call"),
    ],
)
async def test_a_replica_that_is_lost_hands_over_in_mid_stream(lose):
    first, second = Replica(life=10), Replica()
    got = []
    async for chunk in client(first, second).generate(request(TEXT)):
        got.append(chunk)
        if sum(len(c.ids) for c in got) == 10 and not second.engine.requests:
            lose(first)
    assert ("".join(chunk.text for chunk in got), got[-1].receipt.resumed) == (TEXT, 1)
    assert len(second.engine.requests[0].resume_ids) == 10
    assert first.engine.cancelled == ["r"]


async def test_a_replica_that_says_nothing_is_tried_elsewhere_three_times_at_most():
    assert await answer(client(Refusal(None), Replica()).generate(request(TEXT))) == (TEXT, 1, "length")
    with pytest.raises(WorkerCrashedError):
        await answer(client(Refusal(None)).generate(request(TEXT)))


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (RequestError("max_tokens", "is too many"), RequestError),
        (RayTaskError("generate", "traceback", OverloadedError("full")).as_instanceof_cause(), OverloadedError),
        (BackPressureError(num_queued_requests=9, max_queued_requests=8), OverloadedError),
    ],
)
async def test_a_refusal_arrives_as_itself_and_is_not_tried_again(raised, seen):
    with pytest.raises(seen) as caught:
        await answer(client(Refusal(raised), Replica()).generate(request(TEXT)))
    assert type(caught.value) is seen


async def test_a_client_that_leaves_cancels_its_request_alone():
    replica = Replica(life=10)
    gateway = client(replica)
    stays, leaves = (gateway.generate(request(TEXT, name=name)) for name in ("stays", "leaves"))
    await anext(stays)
    await anext(leaves)
    await leaves.aclose()
    await asyncio.sleep(0.05)
    assert replica.engine.cancelled == ["leaves"]
    await stays.aclose()
