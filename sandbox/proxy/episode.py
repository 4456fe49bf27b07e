"""Episode: what the proxy remembers of one episode between its calls."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sandbox.proxy.canonical import START_STATE, digest, next_state
from sandbox.proxy.errors import CallIndexReused
from sandbox.proxy.result import ProxyResult
from sandbox.proxy.world import World


@dataclass(slots=True)
class Episode:
    """``id`` is the orchestrator's name of it, ``token`` what the sandbox shows."""

    id: str
    world: World
    policy_version: int | None = None
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    owner: str | None = None
    """Process whose session this is, as ``infra.owners`` names it; None = nobody says."""
    canary: str | None = None
    state: str = START_STATE
    _occurrences: Counter[tuple[str, str]] = field(default_factory=Counter)
    _calls: dict[int, tuple[str, asyncio.Task[ProxyResult]]] = field(default_factory=dict)
    _next_index: int = 0

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def running(self) -> list[asyncio.Task[ProxyResult]]:
        """Calls without a result yet."""
        return [task for _, task in self._calls.values() if not task.done()]

    def next_index(self) -> int:
        """Index for a caller that does not count its calls."""
        return self._next_index

    def known(
        self, index: int, tool: str, arguments: dict[str, Any]
    ) -> asyncio.Task[ProxyResult] | None:
        """The call with this index if it came before; a repeated delivery is not a second call.
        CallIndexReused when it was another call."""
        if index not in self._calls:
            return None
        fingerprint, task = self._calls[index]
        if fingerprint != _fingerprint(tool, arguments):
            raise CallIndexReused(f"call index {index} was another call; count calls from 0")
        return task

    def remember(
        self, index: int, tool: str, arguments: dict[str, Any], task: asyncio.Task[ProxyResult]
    ) -> None:
        self._calls[index] = (_fingerprint(tool, arguments), task)
        self._next_index = max(self._next_index, index + 1)

    def place(self, request_key: str, reads: bool) -> tuple[str, int]:
        """(state token, occurrence) of a request, then move on: a call that may change the world
        changes the state token. Taken at admission, so that calls which run side by side replay in
        the order they came."""
        state = self.state
        occurrence = self._occurrences[request_key, state]
        self._occurrences[request_key, state] += 1
        if not reads:
            self.state = next_state(state, request_key)
        return state, occurrence


def _fingerprint(tool: str, arguments: dict[str, Any]) -> str:
    try:
        return digest([tool, arguments])
    except (ValueError, RecursionError):  # no JSON; the pipeline refuses it
        return repr(tool)
