"""How patient a rollout worker is, and how much it does at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Times are seconds. Every wait is also bounded by the episode's own deadline."""

    max_attempts: int = 5
    """Whole-episode tries when a sandbox or engine fails; then the outcome is infra_error."""
    max_rebuilds: int = 6
    """Rebuilds of a lost engine context in a row inside one attempt."""
    backoff_s: float = 0.05
    """First pause before a rebuild or restart; doubles each time."""
    max_concurrent: int = 24
    """Episodes in flight per worker; no more than the sandbox pool holds."""
    deterministic: bool = True
    """ContextPolicy.deterministic of every context."""
    max_context: int | None = None
    """The engine's longest context; a longer episode ends with token_budget. None = a worker
    asks the engine; outside a worker there is no limit."""
    start_timeout_s: float = 60.0
    """Getting a box and setting its world up."""
    step_timeout_s: float = 120.0
    """One engine call."""
    call_timeout_s: float = 60.0
    """One tool call. The session enforces the task's own shorter limit; hitting this one means
    that the session itself hangs."""
    verify_timeout_s: float = 120.0
    release_timeout_s: float = 10.0
    """Giving a context or a box back."""
