"""Memo: a request that carries an Idempotency-Key runs once, however often it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from sandbox.server.errors import KeyReused, TooManyCalls

T = TypeVar("T")


class Memo(Generic[T]):
    """Answers by key; a request that failed is forgotten, so that it can be tried again."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._known: dict[str, tuple[str, asyncio.Task[T]]] = {}

    async def once(
        self, key: str | None, fingerprint: str, work: Callable[[], Awaitable[T]]
    ) -> tuple[T, bool]:
        """(answer, whether it is a repeated one). Without a key ``work`` simply runs.

        KeyReused when the key came with another request before. Who waits may be cancelled; the
        work then goes on for the one who asks again.
        """
        if key is None:
            return await work(), False
        known = self._known.get(key)
        if known is not None:
            if known[0] != fingerprint:
                raise KeyReused(f"Idempotency-Key {key!r} came with another request before")
            return await asyncio.shield(known[1]), True
        if len(self._known) >= self._max_keys:
            raise TooManyCalls(f"{self._max_keys} idempotency keys are in use, which is the limit")
        task = asyncio.ensure_future(_run(work))
        self._known[key] = (fingerprint, task)
        task.add_done_callback(lambda done: self._drop_failed(key, done))
        return await asyncio.shield(task), False

    def forget(self, key: str | None) -> None:
        """Free a key."""
        if key is not None:
            self._known.pop(key, None)

    def _drop_failed(self, key: str, task: asyncio.Task[T]) -> None:
        if task.cancelled() or task.exception() is not None:
            self.forget(key)


async def _run(work: Callable[[], Awaitable[T]]) -> T:
    return await work()
