"""Generators read side by side: nothing lost, nothing left open."""

import asyncio
from collections import Counter

import pytest

from serving.api.connection import merged


class Source:
    """Yields `items`, a pause before each; an exception is raised instead."""

    def __init__(self, *items, pause_s=0.0):
        self._items, self._pause_s = items, pause_s
        self.num_read, self.is_open = 0, False

    async def read(self):
        self.is_open = True
        try:
            for item in self._items:
                await asyncio.sleep(self._pause_s)
                self.num_read += 1
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            await asyncio.sleep(0.005)
            self.is_open = False


async def test_every_item_comes_once_and_each_source_in_its_order():
    sources = [Source(*((name, number) for number in range(size))) for name, size in [("a", 5), ("b", 0), ("c", 9)]]
    items = [item async for item in merged([source.read() for source in sources])]
    assert Counter(name for name, _ in items) == {"a": 5, "c": 9}
    for name in "ac":
        own = [number for given, number in items if given == name]
        assert own == sorted(own)
    assert not any(source.is_open for source in sources)


async def test_a_fast_source_does_not_wait_for_a_slow_one():
    fast, slow = Source(*range(5)), Source("slow", pause_s=0.2)
    assert [item async for item in merged([slow.read(), fast.read()])] == [*range(5), "slow"]


async def test_no_source_is_read_more_than_one_item_ahead():
    sources = [Source(*range(9)), Source(*range(9))]
    items = merged([source.read() for source in sources])
    for _ in range(2):
        await anext(items)
    await asyncio.sleep(0.01)
    assert all(source.num_read <= 2 for source in sources)
    await items.aclose()


async def test_the_first_error_is_raised_and_closes_the_others():
    failing, other = Source(1, ValueError("boom")), Source(*range(99), pause_s=0.001)
    with pytest.raises(ValueError, match="boom"):
        _ = [item async for item in merged([other.read(), failing.read()])]
    assert not any(source.is_open for source in (failing, other))


@pytest.mark.parametrize("num_taken", [0, 1, 3])
async def test_closing_it_closes_all_wherever_they_are(num_taken):
    sources = [Source(*range(9)), Source(*range(9), pause_s=60)]
    items = merged([source.read() for source in sources])
    for _ in range(num_taken):
        await anext(items)
    await items.aclose()
    assert not any(source.is_open for source in sources)


async def test_cancelling_its_reader_closes_all():
    sources = [Source("a", pause_s=60), Source("b", pause_s=60)]
    reading = asyncio.create_task(anext(merged([source.read() for source in sources])))
    await asyncio.sleep(0.01)
    assert all(source.is_open for source in sources)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not any(source.is_open for source in sources)
