"""despite_cancel: clean-up ends, the cancel gets through, errors are not lost."""

from __future__ import annotations

import asyncio

import pytest

from parl.rollout.cleanup import despite_cancel


def test_clean_up_goes_on_through_several_cancels():
    """Each cancel waits for the work to end; the caller is cancelled afterwards."""
    done = []

    async def work():
        for _ in range(5):
            await asyncio.sleep(0)
        done.append(True)

    async def body():
        task = asyncio.create_task(despite_cancel(work()))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done

    asyncio.run(body())


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_error_in_the_work_is_raised_unless_a_cancel_must_be(cancelled: bool):
    """The cancel wins: the caller's caller waits for it."""

    async def work():
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        raise ValueError("broken")

    async def body():
        task = asyncio.create_task(despite_cancel(work()))
        await asyncio.sleep(0)
        if cancelled:
            task.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else ValueError):
            await task

    asyncio.run(body())
