"""What every kind of upstream offers to ToolProxy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from sandbox.proxy.result import Reply


@dataclass(frozen=True, slots=True)
class ToolListing:
    """A tool as its upstream describes it, after the author's overrides of effect and text."""

    name: str
    description: str
    schema: dict[str, Any]
    effect: str
    idempotent: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON object, inverse of ``ToolListing(**data)``."""
        return {
            "name": self.name,
            "description": self.description,
            "schema": self.schema,
            "effect": self.effect,
            "idempotent": self.idempotent,
        }


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked call, ready to be sent. ``canonical`` is what cassettes compare; ``key`` names the
    credential (or upstream) whose quota it takes; ``payload`` is the upstream's own."""

    tool: str
    canonical: dict[str, Any]
    key: str
    payload: Any


@dataclass(frozen=True, slots=True)
class SendContext:
    """The call a request belongs to."""

    episode: str
    timeout_s: float
    idempotency_key: str
    idempotency_header: str | None


class Upstream(Protocol):
    """All methods run on the proxy's event loop."""

    kind: str

    async def listings(self) -> list[ToolListing]:
        """The tools, asked of the upstream itself. CallFailure when it cannot be asked."""
        ...

    def prepare(self, tool: str, arguments: dict[str, Any]) -> Prepared:
        """Build the request and hold it against the access rules; pure. BadArguments,
        AccessDenied."""
        ...

    async def send(self, prepared: Prepared, context: SendContext) -> Reply:
        """One attempt. Transient when another may help, other CallFailures are final."""
        ...

    async def open_episode(self, episode: str, data: dict[str, Any]) -> None:
        """Make the episode's own state, if the kind has any."""
        ...

    async def close_episode(self, episode: str) -> None:
        """Drop it; idempotent."""
        ...

    async def close(self) -> None:
        """End connections and processes; idempotent."""
        ...
