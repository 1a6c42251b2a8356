"""From a Target's engine thread to a Gateway's streams over one connection: whole, together, and never for nothing."""

import asyncio
import pickle
import socket
import threading
from contextlib import ExitStack, asynccontextmanager, contextmanager

import pytest

from serving.deploy.inlets import Inlets
from serving.deploy.outlets import Outlet, Outlets
from serving.deploy.pace import Pace
from serving.deploy.wire import ChannelLostError, new_name, notice_silence, read_frame
from serving.requests import Chunk, Receipt

HOST = "127.0.0.1"


def chunk(name, number, *, last=False):
    return Chunk(
        name,
        (number,),
        f"{number} ",
        Receipt(rounds=number + 1, emitted=number + 1),
        finish_reason="length" if last else None,
    )


@pytest.fixture
async def outlets(tidy_loop):
    return Outlets(HOST)


@pytest.fixture
def inlets():
    return Inlets()


@contextmanager
def departures(outlet, *names):
    with ExitStack() as stack:
        yield [stack.enter_context(outlet.departure(name)) for name in names]


@asynccontextmanager
async def connection(outlets, name):
    """A Gateway's side, read by hand."""
    reader, writer = await asyncio.open_connection(*outlets.address)
    writer.write(name)
    yield reader
    writer.close()
    await writer.wait_closed()


class Writer:
    """A connection's other end that keeps the frames; it takes none while `takes` is clear."""

    transport = property(lambda self: self)

    def __init__(self):
        self.frames = []
        self.takes, self.written = asyncio.Event(), asyncio.Event()
        self.takes.set()

    def set_write_buffer_limits(self, high): ...

    def write(self, data):
        self.frames.append(pickle.loads(data[4:]))
        self.written.set()

    async def drain(self):
        await self.takes.wait()


async def until_sent(departure, num_tokens):
    async with asyncio.timeout(5):
        while departure.num_tokens < num_tokens:
            await asyncio.sleep(0.001)


async def answer(inbox):
    taken = [await inbox.take()]
    while taken[-1].finish_reason is None:
        taken.append(await inbox.take())
    return [token for chunk in taken for token in chunk.ids], taken[-1].receipt.rounds


async def test_every_token_of_every_stream_arrives_once_and_in_order(outlets, inlets):
    names, count = [str(i) for i in range(8)], 300

    def rounds(outlet):
        for number in range(count):
            for name in names:
                outlet.put(chunk(name, number, last=number == count - 1))

    outlet = outlets.outlet(inlets.name)
    with departures(outlet, *names) as departing, ExitStack() as stack:
        inboxes = [stack.enter_context(inlets.inbox(name)) for name in names]
        for inbox in inboxes:
            inlets.connect(inbox, outlets.address)
        threading.Thread(target=rounds, args=(outlet,)).start()
        assert await asyncio.gather(*map(answer, inboxes)) == [(list(range(count)), count)] * len(names)
        await asyncio.gather(*(departure.complete() for departure in departing))
    assert [(d.num_tokens, d.finish_reason) for d in departing] == [(count, "length")] * len(names)


async def test_a_round_of_all_streams_is_one_frame(outlets):
    name = new_name()
    outlet = outlets.outlet(name)
    with departures(outlet, "a", "b", "c") as departing:
        async with connection(outlets, name) as reader:
            for number in range(3):
                for request in "abc":
                    outlet.put(chunk(request, number))
                frame = await read_frame(reader)
                assert [(c.request_id, c.ids) for c in frame] == [(request, (number,)) for request in "abc"]
                await until_sent(departing[-1], number + 1)


@asynccontextmanager
async def paced(pace):
    outlet, writer = Outlet(pace=pace), Writer()
    connected = asyncio.create_task(outlet.send_to(asyncio.StreamReader(), writer))
    try:
        yield outlet, writer
    finally:
        connected.cancel()


def every(period_s):
    return Pace(period_s, period_s)


async def test_within_a_period_only_the_requests_leave_that_begin_or_end(tidy_loop):
    async with paced(every(3600.0)) as (outlet, writer):
        with departures(outlet, "a", "b") as (first, second):
            outlet.put(chunk("a", 0))
            await until_sent(first, 1)
            outlet.put(chunk("a", 1))
            await asyncio.sleep(0.02)
            assert len(writer.frames) == 1
            outlet.put(chunk("a", 2))
            outlet.put(chunk("b", 0))
            await until_sent(second, 1)
            outlet.put(chunk("b", 1))
            outlet.put(chunk("a", 3, last=True))
            await asyncio.wait_for(first.complete(), 5)
            outlet.put(chunk("b", 2, last=True))
            await asyncio.wait_for(second.complete(), 5)
    frames = [[(c.request_id, c.ids) for c in frame] for frame in writer.frames]
    assert frames == [[("a", (0,))], [("b", (0,))], [("a", (1, 2, 3))], [("b", (1, 2))]]


async def test_what_waits_for_the_period_leaves_by_itself(tidy_loop):
    async with paced(every(0.05)) as (outlet, writer):
        with departures(outlet, "a") as (departure,):
            outlet.put(chunk("a", 0))
            await until_sent(departure, 1)
            for number in (1, 2):
                outlet.put(chunk("a", number))
            await asyncio.wait_for(until_sent(departure, 3), 5)
    assert [[c.ids for c in frame] for frame in writer.frames] == [[(0,)], [(1, 2)]]


async def test_what_stays_behind_when_another_begins_leaves_by_itself(tidy_loop):
    async with paced(every(0.05)) as (outlet, writer):
        with departures(outlet, "a", "b") as (first, second):
            outlet.put(chunk("a", 0))
            await until_sent(first, 1)
            outlet.put(chunk("a", 1))
            outlet.put(chunk("b", 0))
            await until_sent(first, 2)
            assert second.num_tokens == 1
    assert [[(c.request_id, c.ids) for c in frame] for frame in writer.frames[1:]] == [[("b", (0,))], [("a", (1,))]]


async def test_those_that_begin_and_end_do_not_put_off_the_others(tidy_loop):
    async with paced(every(0.05)) as (outlet, _):
        with departures(outlet, "a") as (departure,):
            outlet.put(chunk("a", 0))
            await until_sent(departure, 1)
            outlet.put(chunk("a", 1))
            for number in range(100):
                with departures(outlet, str(number)):
                    outlet.put(chunk(str(number), 0, last=True))
                    await asyncio.sleep(0.01)
                if departure.num_tokens == 2:
                    break
            assert number < 50


async def test_the_period_is_that_of_the_streams_that_have_begun(tidy_loop):
    class Noted(Pace):
        def period_s(self, num_streams):
            asked.append(num_streams)
            return super().period_s(num_streams)

    asked = []
    async with paced(Noted()) as (outlet, _):
        with departures(outlet, "a", "queued", "b") as (first, _, second):
            outlet.put(chunk("a", 0))
            await until_sent(first, 1)
            outlet.put(chunk("b", 0))
            await until_sent(second, 1)
            outlet.put(chunk("a", 1))
            await until_sent(first, 2)
    assert asked == [0, 1, 2]


async def test_paced_rounds_of_another_thread_all_arrive(tidy_loop):
    def rounds(outlet):
        for number in range(200):
            for name in "abc":
                outlet.put(chunk(name, number, last=number == 199))

    async with paced(every(0.001)) as (outlet, writer):
        with departures(outlet, *"abc") as departing:
            threading.Thread(target=rounds, args=(outlet,)).start()
            await asyncio.wait_for(asyncio.gather(*(departure.complete() for departure in departing)), 5)
    for name in "abc":
        assert [token for frame in writer.frames for c in frame if c.request_id == name for token in c.ids] == [
            *range(200)
        ]


async def test_rounds_gather_while_they_cannot_leave(outlets):
    name = new_name()
    outlet = outlets.outlet(name)
    with departures(outlet, "a", "b"):
        for number in range(5):
            outlet.put(chunk("a", number))
        outlet.put(chunk("b", 0))
        async with connection(outlets, name) as reader:
            first, second = await read_frame(reader)
    assert (first.ids, first.text, first.receipt.rounds) == ((0, 1, 2, 3, 4), "0 1 2 3 4 ", 5)
    assert (second.request_id, second.ids) == ("b", (0,))


async def test_chunks_gather_while_nobody_takes_them(inlets):
    with inlets.inbox("a") as inbox:
        for number in range(4):
            inbox.put(chunk("a", number))
        assert (await inbox.take()).ids == (0, 1, 2, 3)


async def test_what_a_request_that_has_left_still_gives_is_dropped(outlets):
    name = new_name()
    outlet = outlets.outlet(name)
    with departures(outlet, "stays"):
        with departures(outlet, "leaves"):
            outlet.put(chunk("leaves", 0))
        outlet.put(chunk("stays", 0))
        async with connection(outlets, name) as reader:
            assert [c.request_id for c in await read_frame(reader)] == ["stays"]


async def test_an_inbox_gives_what_it_has_before_it_fails(outlets, inlets):
    outlet = outlets.outlet(inlets.name)
    with departures(outlet, "a") as (departure,), inlets.inbox("a") as inbox, inlets.inbox("elsewhere") as other:
        inlets.connect(inbox, outlets.address)
        outlet.put(chunk("a", 0))
        await until_sent(departure, 1)
        outlet.disconnect()
        with pytest.raises(ChannelLostError):
            await departure.complete()
        assert (await inbox.take()).ids == (0,)
        with pytest.raises(ChannelLostError):
            await inbox.take()
        other.put(chunk("elsewhere", 0))
        assert (await other.take()).ids == (0,)


async def test_a_gateway_that_goes_loses_its_departures_and_is_forgotten(outlets):
    name = new_name()
    outlet = outlets.outlet(name)
    with departures(outlet, "a") as (departure,):
        async with connection(outlets, name):
            outlet.put(chunk("a", 0))
            await until_sent(departure, 1)
        with pytest.raises(ChannelLostError):
            await departure.complete()
    another = outlets.outlet(name)
    assert another is not outlet
    await asyncio.sleep(0.01)
    assert outlets.outlet(name) is another


async def test_a_gateway_that_has_no_requests_is_forgotten_once_it_goes(outlets):
    name = new_name()
    outlet = outlets.outlet(name)
    async with connection(outlets, name) as reader:
        with departures(outlet, "a"):
            outlet.put(chunk("a", 0))
            await read_frame(reader)
        assert outlets.outlet(name) is outlet
    await asyncio.sleep(0.01)
    assert outlets.outlet(name) is not outlet


async def test_a_gateway_that_never_connects_is_not_waited_for_for_ever(tidy_loop):
    outlet = Outlet(connect_s=0.05)
    with departures(outlet, "a") as (departure,):
        outlet.put(chunk("a", 0, last=True))
        with pytest.raises(ChannelLostError):
            await asyncio.wait_for(departure.complete(), 5)


async def test_a_connection_may_last_longer_than_one_is_waited_for(tidy_loop):
    outlet, writer = Outlet(connect_s=0.05), Writer()
    connected = asyncio.create_task(outlet.send_to(asyncio.StreamReader(), writer))
    with departures(outlet, "a") as (departure,):
        await asyncio.sleep(0.1)
        outlet.put(chunk("a", 0, last=True))
        await asyncio.wait_for(departure.complete(), 5)
    connected.cancel()


async def test_what_a_connection_was_to_carry_never_leaves_by_its_successor(tidy_loop):
    outlet, former, later = Outlet(), Writer(), Writer()
    former.takes.clear()
    with departures(outlet, "a") as (lost,):
        outlet.put(chunk("a", 0))
        connections = [asyncio.create_task(outlet.send_to(asyncio.StreamReader(), former))]
        await former.written.wait()
        outlet.put(chunk("a", 1, last=True))
        connections.append(asyncio.create_task(outlet.send_to(asyncio.StreamReader(), later)))
        await asyncio.sleep(0)
        with departures(outlet, "b") as (departure,):  # begins while the former connection still ends
            outlet.put(chunk("b", 0, last=True))
            await asyncio.wait_for(departure.complete(), 5)
        with pytest.raises(ChannelLostError):
            await asyncio.wait_for(lost.complete(), 5)
    assert [[c.request_id for c in frame] for frame in later.frames] == [["b"]]
    for connection in connections:
        connection.cancel()


async def test_a_connection_that_cannot_deliver_breaks_by_itself(outlets):
    _, writer = await asyncio.open_connection(*outlets.address)
    notice_silence(writer)
    limit_ms = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    writer.close()
    await writer.wait_closed()
    assert limit_ms == 10_000


async def test_after_a_loss_the_next_request_connects_anew(outlets, inlets):
    for name in ("a", "b"):
        outlet = outlets.outlet(inlets.name)
        with departures(outlet, name), inlets.inbox(name) as inbox:
            inlets.connect(inbox, outlets.address)
            outlet.put(chunk(name, 0, last=True))
            assert (await inbox.take()).finish_reason == "length"
            outlet.disconnect()
            with pytest.raises(ChannelLostError):
                await inbox.take()


async def test_a_target_that_cannot_be_reached_is_a_lost_channel(outlets, inlets):
    outlets.close()
    await asyncio.sleep(0.01)
    with inlets.inbox("a") as inbox:
        inlets.connect(inbox, outlets.address)
        with pytest.raises(ChannelLostError):
            await inbox.take()


async def test_a_stranger_gets_nothing(outlets):
    known = new_name()
    outlet = outlets.outlet(known)
    with departures(outlet, "a"):
        outlet.put(chunk("a", 0))
        async with connection(outlets, new_name()) as reader:
            assert await reader.read() == b""


async def test_of_two_connections_by_one_name_the_later_one_is_the_gateways(outlets):
    name = new_name()
    outlet = outlets.outlet(name)
    async with connection(outlets, name) as former:
        with departures(outlet, "a") as (departure,):
            outlet.put(chunk("a", 0))
            await until_sent(departure, 1)
            async with connection(outlets, name) as later:
                assert len(await read_frame(former)) == 1
                assert await former.read() == b""
                with pytest.raises(ChannelLostError):
                    await departure.complete()
                with departures(outlet, "b"):
                    outlet.put(chunk("b", 0))
                    assert [c.request_id for c in await read_frame(later)] == ["b"]
