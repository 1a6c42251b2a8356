"""Work that ends as soon as its client leaves, and generators that are always closed."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
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
