"""A cancellation that a library dropped still ends the task."""

import asyncio
import contextlib

import pytest

from shared.cancellation import raise_if_cancelled


async def test_a_task_whose_cancellation_was_dropped_ends_at_the_next_look():
    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            raise_if_cancelled()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)


async def test_a_task_that_was_not_cancelled_goes_on_also_after_a_timeout_of_its_own():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.sleep(1)
    raise_if_cancelled()
