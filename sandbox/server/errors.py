"""What the server refuses, and how each error looks on the wire.

ServerError
├── Unauthorized      401  no token, or one that is not valid (any more)
├── NotFound          404  no such task or session
├── SessionClosed     404  the session was closed, maybe while the request was running
├── WrongState        409  the session is over, or was verified with another answer
├── KeyReused         409  an Idempotency-Key came with another request
├── TooManyCalls      429  calls of one session are queued up
├── Busy              503  no room; come back later
└── TooSlow           504  it takes longer than we wait, and goes on
"""

from __future__ import annotations

from typing import ClassVar

from infra.errors import ConfigError, LedgerError, ParlError
from sandbox.errors import BackendUnavailable, SandboxError, SandboxLost, TaskError

RETRY_AFTER_S = 2


class ServerError(SandboxError):
    """Base class; ``code`` and ``status`` go to the client."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retry_after_s: ClassVar[int | None] = None


class Unauthorized(ServerError):
    """The request carries no valid token for this door."""

    code, status = "unauthorized", 401


class NotFound(ServerError):
    """No such task, or no such session."""

    code, status = "not_found", 404


class WrongState(ServerError):
    """The session's state does not allow the request."""

    code, status = "wrong_state", 409


class KeyReused(ServerError):
    """The same Idempotency-Key was sent with another request."""

    code, status = "idempotency_key_reused", 409


class SessionClosed(ServerError):
    """There was such a session."""

    code, status = "session_closed", 404


class TooManyCalls(ServerError):
    """A session runs its calls one after the other; too many wait already."""

    code, status, retry_after_s = "too_many_calls", 429, 1


class Busy(ServerError):
    """There is no room now."""

    code, status, retry_after_s = "busy", 503, RETRY_AFTER_S


class TooSlow(ServerError):
    """The work goes on, but the client should not wait."""

    code, status = "too_slow", 504


class BadToken(ConfigError):
    """The orchestrator's token cannot be had from file or environment."""


class PortTaken(ServerError):
    """The address to serve on cannot be opened."""


def describe(error: ParlError) -> tuple[int, str, bool, int | None]:
    """(HTTP status, code, whether infrastructure failed, Retry-After in s) of an error.

    ``infra`` true: no episode may get a reward, not even 0, from this answer.
    """
    match error:
        case ServerError():
            return error.status, error.code, error.status >= 500, error.retry_after_s
        case SandboxLost():
            return 502, "sandbox_lost", True, None
        case BackendUnavailable():
            return 503, "backend_unavailable", True, 60
        case TaskError():
            return 422, "bad_task", False, None
        case LedgerError():
            return 503, "ledger_unavailable", True, RETRY_AFTER_S
        case SandboxError():
            # the pool's "no box came free"; states are checked before a session is asked
            return 503, Busy.code, True, RETRY_AFTER_S
    return 500, "internal", True, None
