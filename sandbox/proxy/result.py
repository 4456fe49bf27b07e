"""What a call gives back, and what travels between proxy and upstreams."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from sandbox.proxy.errors import CallFailure, Outcome


@dataclass(frozen=True, slots=True)
class ProxyResult:
    """Result of one call. ``error`` is a code of sandbox.proxy.errors or None; ``infra`` failures
    never count against the policy. ``value`` is the JSON the text was made of, None for plain text
    or when the text was cut. ``num_bytes`` counts the body before shaping."""

    text: str
    value: Any = None
    error: str | None = None
    infra: bool = False
    outcome: Outcome = "done"
    mode: str | None = None
    effect: str | None = None
    status: int | None = None
    cassette_hit: bool = False
    cassette_digest: str | None = None
    num_bytes: int = 0
    elapsed_ms: float = 0.0
    cost: float = 0.0
    num_attempts: int = 0
    cut: bool = False
    canary_leak: bool = False
    """The arguments held this episode's canary: text of a tool result steers the policy."""

    def to_dict(self) -> dict[str, Any]:
        """JSON object, inverse of ``ProxyResult(**data)``."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Reply:
    """An upstream's answer before shaping, exactly what a cassette holds (scrubbed).

    ``failed``: the tool itself reports a failure (MCP isError, ToolError of a simulator).
    """

    body: bytes
    media_type: str = "application/json"
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    failed: bool = False


@dataclass(slots=True)
class Account:
    """What a running call has used so far; filled while it runs, read by audit and result."""

    mode: str | None = None
    effect: str | None = None
    kind: str | None = None
    status: int | None = None
    cassette_hit: bool = False
    cassette_digest: str | None = None
    num_bytes: int = 0
    cost: float = 0.0
    num_attempts: int = 0
    idempotency_key: str | None = None
    argument_hash: str | None = None
    canary_leak: bool = False


def failed_result(failure: CallFailure, account: Account, elapsed_ms: float) -> ProxyResult:
    """The result of a call that raised; the text is ``code: message``."""
    return ProxyResult(
        text=f"{failure.code}: {failure}",
        error=failure.code,
        infra=failure.infra,
        outcome=failure.outcome,
        mode=account.mode,
        effect=account.effect,
        status=failure.status if failure.status is not None else account.status,
        cassette_hit=account.cassette_hit,
        cassette_digest=account.cassette_digest,
        num_bytes=account.num_bytes,
        elapsed_ms=elapsed_ms,
        cost=account.cost,
        num_attempts=account.num_attempts,
        canary_leak=account.canary_leak,
    )
