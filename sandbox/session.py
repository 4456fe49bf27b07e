"""Session: one episode's world, from start to verdict. The protocol and its values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable


class SessionState(StrEnum):
    NEW = "new"
    RUNNING = "running"
    STOPPED = "stopped"  # a violation or limit ended it; verify() is still allowed
    VERIFIED = "verified"
    CLOSED = "closed"


class Stop(StrEnum):
    """Why the session itself ended the episode; parl.trajectory maps it to an Outcome."""

    LOOP = "loop"
    ILLEGAL_CALL = "illegal_call"
    PARSE_FAILURE = "parse_failure"
    UNPARSED_RESULT = "unparsed_result"
    """A tool's answer does not fit the result schema it declares."""
    ENV_ERROR = "env_error"
    INFRA_ERROR = "infra_error"
    """The tools' upstream kept failing (429, 5xx, resets): nobody's reward."""


@dataclass(frozen=True, slots=True)
class RawCall:
    """A tool call exactly as the model wrote it (from engine.chat or an OpenAI tool call).

    ``turn``: number of the assistant turn it stands in; calls of one turn are parallel, and the
    loop detector compares them as a set. None: every call is a turn of its own. ``finish_reason``:
    of the message; "length" = the writer was cut off, so nothing is closed for it.
    """

    name_text: str
    arguments_text: str
    turn: int | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model reads next. ``error`` is a short class name or None: "unparsable",
    "unknown_tool", "forbidden_tool", "bad_json", "bad_arguments" (the call did not run),
    "tool_error" (it ran and failed), "infra_error" (its upstream failed, not counted against the
    policy), "unparsed_result", "env_error". ``repairs``: see ``sandbox.calls.types.DecodedCall``;
    tags that begin with "result:" mend the tool's answer. ``loop`` is "detector:warn" or
    "detector:stop", ``loop_span`` the first and last call of the loop (1-based, of the calls that
    ran). ``stop`` set = the episode is over."""

    text: str
    error: str | None = None
    repairs: tuple[str, ...] = ()
    loop: str | None = None
    elapsed_s: float = 0.0
    media: tuple[Any, ...] = ()
    stop: Stop | None = None
    tool: str | None = None
    arguments: dict[str, Any] | None = None
    loop_span: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """``correctness`` in [0, 1]; ``passed`` = correctness >= the task's pass_threshold.

    A verifier that crashes or answers out of range gives correctness None and ``error`` (the
    episode becomes verifier_error, reward None)."""

    correctness: float | None
    passed: bool
    reasons: tuple[str, ...] = ()
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Session(Protocol):
    """Async state machine: new -> running -> (stopped) -> verified -> closed.

    ``call`` and ``verify`` raise SandboxLost when the box died and SessionStateError-like
    SandboxError for a call out of order; a violation of the policy raises nothing.
    """

    @property
    def state(self) -> SessionState: ...

    @property
    def enforced(self) -> dict[str, Any]:
        """The limits this episode's world really has; None = not enforced at its level."""
        ...

    async def start(self) -> Observation:
        """Set the world up for this task instance; the text is the instruction."""
        ...

    async def call(self, raw: RawCall) -> Observation:
        """Parse, validate and run one tool call."""
        ...

    async def verify(self, final_text: str) -> Verdict:
        """Judge the end state and the final answer."""
        ...

    async def close(self) -> None:
        """Give the box back or destroy it; idempotent, shielded from cancellation."""
        ...
