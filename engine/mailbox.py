"""What crosses between an engine actor and its clients, without Ray."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from engine.runtime.types import ContextId

Call = tuple[int, str, tuple[Any, ...]]
"""(id within the client, verb, arguments); id -1 = nobody waits for the result."""
Answer = tuple[int, Any, Exception | None]
Client = tuple[str, str]
"""(name, incarnation): a restarted process keeps its name."""


@dataclass(slots=True)
class Mailbox:
    """What one client asked for and has not fetched yet, and the contexts it holds."""

    answers: list[Answer] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    # the loop keeps weak references only
    running: set[asyncio.Task[None]] = field(default_factory=set)
    contexts: set[ContextId] = field(default_factory=set)
