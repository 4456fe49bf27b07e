"""Errors of the tool proxy.

    ProxyError
    ├── ProxyConfigError      the configuration is wrong (user error, exit 2)
    ├── BadToken              no episode has this token
    ├── CassetteCorrupt       a cassette cannot be read
    └── CallFailure           one call has no result; recorded, never raised out of ToolProxy.call
        ├── the policy's own   UnknownTool, BadArguments, AccessDenied, EffectForbidden,
        │                      EpisodeQuota, UpstreamRefused, ToolFailed, ResponseTooLarge,
        │                      BinaryRefused, CallIndexReused
        └── infrastructure     CassetteMiss, NoSimulator, SharedQuota, RateLimited, UpstreamFailed,
                               Unreachable, OutcomeUnknown, AddressForbidden, RedirectRefused,
                               CredentialRefused, SecretUnavailable, SimulatorFailed, McpFailed,
                               RecordFailed, RecordLost, ProxyCrashed

``code`` is what ledgers and audit lines hold; ``infra`` failures are never counted against the
policy. A message is read by the model: it holds no address of an upstream and no secret.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from infra.errors import ConfigError
from sandbox.errors import SandboxError

Outcome = Literal["done", "failed", "denied", "unknown"]
"""done: the upstream answered; failed: it did not happen; denied: the proxy refused; unknown: it
may have happened."""


class ProxyError(SandboxError):
    """Base class."""


class ProxyConfigError(ProxyError, ConfigError):
    """A proxy configuration, OpenAPI document, secret or tool declaration is wrong."""

    exit_code = 2


class BadToken(ProxyError):
    """The token belongs to no open episode."""


class CassetteCorrupt(ProxyError):
    """A cassette has a record of another schema version or one that is damaged."""


class CallFailure(ProxyError):
    """A call without a result."""

    code: ClassVar[str] = "failed"
    infra: ClassVar[bool] = False
    outcome: ClassVar[Outcome] = "failed"

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status, where there was one."""


class UnknownTool(CallFailure):
    code = "unknown_tool"
    outcome = "denied"


class BadArguments(CallFailure):
    code = "bad_arguments"
    outcome = "denied"


class CallIndexReused(CallFailure):
    """A call index came twice with different calls."""

    code = "call_index_reused"
    outcome = "denied"


class AccessDenied(CallFailure):
    """No access rule allows method, host and path."""

    code = "access_denied"
    outcome = "denied"


class EffectForbidden(CallFailure):
    """The tool's mode is live_read and its effect is not read."""

    code = "effect_forbidden"
    outcome = "denied"


class EpisodeQuota(CallFailure):
    """The episode used up its own calls, rate or money."""

    code = "episode_quota"
    outcome = "denied"


class UpstreamRefused(CallFailure):
    """The API answered 4xx: the call was wrong."""

    code = "upstream_4xx"


class ToolFailed(CallFailure):
    """The tool ran and said that it failed."""

    code = "tool_error"


class ResponseTooLarge(CallFailure):
    code = "response_too_large"


class BinaryRefused(CallFailure):
    code = "binary_refused"


class InfraFailure(CallFailure):
    """Not the policy's doing: reward is null, never 0."""

    code = "infra"
    infra = True


class CassetteMiss(InfraFailure):
    """Replay has no record of this request in this state."""

    code = "CASSETTE_MISS"


class NoSimulator(InfraFailure):
    code = "no_simulator"


class SharedQuota(InfraFailure):
    """A bucket or spend cap that other episodes share is empty, or its keeper is gone."""

    code = "shared_quota"
    outcome = "denied"


class RateLimited(InfraFailure):
    code = "upstream_429"


class UpstreamFailed(InfraFailure):
    code = "upstream_5xx"


class Unreachable(InfraFailure):
    """No connection, or no answer to a read."""

    code = "unreachable"


class OutcomeUnknown(InfraFailure):
    """The reply to a call that may not be repeated was lost; it is never sent again."""

    code = "outcome_unknown"
    outcome = "unknown"


class AddressForbidden(InfraFailure):
    """The upstream's name leads to an address inside the node's or cluster's network."""

    code = "address_forbidden"
    outcome = "denied"


class RedirectRefused(InfraFailure):
    code = "redirect_refused"


class CredentialRefused(InfraFailure):
    """401 although the proxy sent a credential: the operator's key is wrong, not the policy."""

    code = "credential_refused"


class SecretUnavailable(InfraFailure):
    code = "secret_unavailable"
    outcome = "denied"


class SimulatorFailed(InfraFailure):
    """The author's Python crashed, hung or died."""

    code = "simulator_failed"


class McpFailed(InfraFailure):
    """The MCP server cannot be started or broke the protocol."""

    code = "mcp_failed"


class RecordFailed(InfraFailure):
    """Audit line, journal or cassette could not be written: nothing runs unrecorded."""

    code = "record_failed"


class RecordLost(RecordFailed):
    """The upstream answered, but what it said could not be recorded."""

    outcome = "done"


class ProxyCrashed(InfraFailure):
    """A fault of the proxy itself, or the call was given up; see the log."""

    code = "proxy_error"
    outcome = "unknown"


class Transient(CallFailure):
    """Raised by an upstream inside the retry loop; ``applied`` says whether the request may have
    taken effect, ``retry_after_s`` what the upstream asked for, ``failure`` what it becomes when
    the tries are used up."""

    def __init__(
        self, failure: InfraFailure, *, applied: bool, retry_after_s: float | None = None
    ) -> None:
        super().__init__(str(failure), failure.status)
        self.failure = failure
        self.applied = applied
        self.retry_after_s = retry_after_s
