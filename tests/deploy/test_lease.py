"""The lease keeper against replicas that grant, renew, fall silent, refuse or die."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from serving.deploy.lease import Grant, LeaseKeeper


class Stream:
    """One lease: a list of what it yields; an exception in it is raised, the end of it ends the lease."""

    def __init__(self, items):
        self.items = list(items)
        self.is_cancelled = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        if not self.items:
            raise StopAsyncIteration
        item = self.items.pop(0)
        if item == "silence":
            await asyncio.sleep(3600)
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self):
        self.is_cancelled = True


def grant(name):
    return Grant(None, name)


class Deployment:
    """Hands out its streams in order, then ones that never answer."""

    def __init__(self, *leases):
        self.opened = []
        self._leases = [Stream(items) for items in leases]
        self.granted = []
        self.beats = 0

    def open(self):
        self.opened.append(self._leases.pop(0) if self._leases else Stream(["silence"]))
        return self.opened[-1]

    def on_grant(self, granted):
        self.granted.append(granted and granted.incarnation)

    def on_beat(self):
        self.beats += 1


async def keep(deployment, *, until):
    keeper = LeaseKeeper(deployment.open, deployment.on_grant, on_beat=deployment.on_beat, retry_s=0.0)
    keeper.start()
    async with asyncio.timeout(5):
        while len(deployment.opened) < until:
            await asyncio.sleep(0)
    return keeper


async def test_a_lease_that_runs_out_is_renewed():
    deployment = Deployment([grant("a"), None, None], [grant("b")])
    keeper = await keep(deployment, until=3)
    keeper.stop()
    assert (deployment.granted, deployment.beats) == (["a", "b"], 2)
    assert [s.is_cancelled for s in deployment.opened[:2]] == [True, True]


@pytest.mark.parametrize("error", [ActorDiedError(), BackPressureError(4, 3), TimeoutError()])
@pytest.mark.parametrize("before", [[], [grant("a")], [grant("a"), None]])
async def test_whatever_ends_it_another_is_asked_for(error, before):
    deployment = Deployment([*before, error], [grant("b"), "silence"])
    keeper = await keep(deployment, until=2)
    await asyncio.sleep(0.01)
    keeper.stop()
    assert deployment.granted == [*(g.incarnation for g in before if g), None, "b"]


async def test_a_lost_actor_is_replaced_at_once():
    deployment = Deployment([grant("a"), "silence"], [grant("b"), "silence"])
    keeper = await keep(deployment, until=1)
    await asyncio.sleep(0.01)
    await asyncio.to_thread(keeper.replace)
    async with asyncio.timeout(5):
        while deployment.granted != ["a", "b"]:
            await asyncio.sleep(0)
    assert deployment.opened[0].is_cancelled
    keeper.stop()


async def test_stopping_gives_the_lease_back():
    deployment = Deployment([grant("a"), "silence"])
    keeper = await keep(deployment, until=1)
    await asyncio.sleep(0.01)
    keeper.stop()
    await asyncio.sleep(0.01)
    assert deployment.opened[0].is_cancelled
