"""What tests of channels share."""

import asyncio

import pytest


@pytest.fixture
async def tidy_loop():
    """Ends the tasks that a test leaves behind, connections among them, as the end of a process would."""
    yield
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)  # transports close one step later
