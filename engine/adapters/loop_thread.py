"""LoopThread: an event loop of one's own, for clients that callers of any thread and loop share.

Connections belong to the loop that opened them; MRI's callers come from many.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from engine.errors import ContextLost

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on its own thread. ``close`` ends what still runs."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._name = name
        self._closed = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            running = asyncio.all_tasks(self.loop)
            for task in running:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*running, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Await ``call`` on the thread; a caller that is cancelled cancels it there."""
        if self._closed:
            call.close()
            raise ContextLost(f"{self._name} was closed; make a new one and rebuild the context")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self.loop))

    def run_blocking(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result()

    async def iterate(self, start: Callable[[], AsyncIterator[T]]) -> AsyncIterator[T]:
        """The items of an asynchronous generator that lives on the thread; leaving early closes
        it there."""
        iterator: Any = start()
        try:
            while True:
                item = await self.run(_next(iterator))
                if not item:
                    return
                yield item[0]
        finally:
            if not self._closed:
                await self.run(iterator.aclose())

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


async def _next(iterator: Any) -> tuple[Any] | tuple[()]:
    # StopAsyncIteration cannot leave a coroutine
    try:
        return (await anext(iterator),)
    except StopAsyncIteration:
        return ()
