"""Work that ends as soon as its client leaves, and generators that are always closed, alone or side by side."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientLeftError(Exception):
    """The client closed its connection before the answer was complete."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; ClientLeftError, with `work` cancelled and cleaned up, if the client is first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


@asynccontextmanager
async def closed_after(items: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """`items`, closed at the end in the same task, whatever happened: that is what frees a request."""
    try:
        yield items
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all `sources` as they come, one of each at most read ahead.

    The first error ends it. Whatever ends it, all sources are closed then, and their work has stopped.
    """
    if len(sources) == 1:  # without a task an item
        async with closed_after(sources[0]) as items:
            async for item in items:
                yield item
        return
    pending: dict[asyncio.Task[T], AsyncGenerator[T, None]] = {}
    try:
        pending.update((_next(source), source) for source in sources)
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in pending if task in done]:  # in the order they were asked
                source = pending.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield item
                pending[_next(source)] = source
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await asyncio.gather(*(source.aclose() for source in sources))


def _next(source: AsyncGenerator[T, None]) -> asyncio.Task[T]:
    async def item() -> T:
        return await anext(source)

    return asyncio.create_task(item())
