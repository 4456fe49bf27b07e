"""Giving things back even while being cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def despite_cancel(work: Coroutine[Any, Any, None]) -> None:
    """Finish ``work`` even if the caller is cancelled meanwhile, then let the cancel through.

    ``work`` must end by itself: each of its own waits has a deadline.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except Exception:
            # the task holds it; task.result() below raises it once
            break
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # mark as seen: the cancel is what the caller must get
        raise cancelled
    task.result()
