"""ToolSession: the state machine of one episode over a Box."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from sandbox.backends.base import Box, Reply
from sandbox.calls.decode import DEFAULT_POLICY, decode
from sandbox.calls.policy import TIER_OF_NAME, RepairPolicy
from sandbox.calls.results import UnparsedResult, read_result
from sandbox.calls.table import ToolTable
from sandbox.calls.types import ILLEGAL_CODES, CallError, DecodedCall
from sandbox.errors import SandboxError
from sandbox.loops import LoopAction, LoopDetector, is_infra_error
from sandbox.proxied import ProxiedTools
from sandbox.session import Observation, RawCall, SessionState, Stop, Verdict
from sandbox.task import TaskSpec
from sandbox.toolkit import clip

ILLEGAL_STOP_AT = 2
MALFORMED_WARN_AT = 2
MALFORMED_STOP_AT = 4
GRACE_S = 5.0
"""The agent in the box enforces a call's own limit; only a dead agent misses limit + grace."""
_CUT = re.compile(r"\n\[cut: \d+ bytes\]\Z")

VerifyFn = Callable[[dict[str, Any], float], Awaitable[Reply]]
"""(``{final_text, end_state, data}``, timeout_s) -> raw answer, run where the agent never was."""
ReleaseFn = Callable[[Box], Awaitable[None]]


class ToolSession:
    """Implements ``sandbox.session.Session``. Counters are per episode and never reset.

    Violations end the episode by ``Observation.stop``: a second call of an unknown or forbidden
    tool (ILLEGAL_CALL), the fourth malformed call (PARSE_FAILURE; a reminder at the second: D5 of
    facts/sandboxes.md 4.2), an answer that does not fit the tool's result schema (UNPARSED_RESULT),
    a loop (LOOP; see sandbox.loops). Ten infrastructure failures in a row end it with INFRA_ERROR.
    After a stop only ``verify`` and ``close`` are allowed.
    """

    def __init__(
        self,
        spec: TaskSpec,
        tools: ToolTable,
        box: Box,
        verify_fn: VerifyFn,
        release: ReleaseFn | None = None,
        repair: RepairPolicy = DEFAULT_POLICY,
        proxied: ProxiedTools | None = None,
    ) -> None:
        """``release`` takes the box back at ``close``; default: kill it. ``repair``: how far the
        run mends broken calls; the task's ``key_repair`` caps it. ``proxied``: tools that run
        elsewhere than in the box; the session closes them."""
        self.spec = spec
        self._tools = tools
        self._box = box
        self._verify_fn = verify_fn
        self._release = release
        self._proxied = proxied
        self._num_calls = 0
        self._state = SessionState.NEW
        self._repair = repair
        self._key_cap = TIER_OF_NAME[spec.key_repair]
        self._loops = LoopDetector({name: tools[name].loop for name in tools})
        self._num_illegal = 0
        self._num_malformed = 0
        self._closing: asyncio.Task[None] | None = None

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def level(self) -> str:
        """Isolation level of the box, for the episode's record."""
        return self._box.level.value

    @property
    def enforced(self) -> dict[str, Any]:
        """Limits the box really has, for the episode's record (``sandbox.backends.enforced``), and
        "cassettes", the digests of what proxied tools replay."""
        found = dict(self._box.enforced)
        return found if self._proxied is None else {**found, "cassettes": self._proxied.cassettes}

    async def start(self) -> Observation:
        """Set the world up; the text is the instruction. A world that cannot be set up stops the
        episode with ENV_ERROR."""
        self._expect("start", SessionState.NEW)
        self._state = SessionState.RUNNING
        reply = await self._request(
            "start", {"data": self.spec.environment.data}, self.spec.limits.setup_timeout_s
        )
        if reply.error is not None:
            text = f"env_error: setup of {self.spec.name} failed: {reply.error} ({reply.value})"
            return self._stopped(
                Observation(text=text, error="env_error", elapsed_s=reply.elapsed_s), Stop.ENV_ERROR
            )
        return Observation(text=self.spec.instruction, elapsed_s=reply.elapsed_s)

    async def call(self, raw: RawCall) -> Observation:
        """Decode and run one call; SandboxLost if the box dies."""
        self._expect("call", SessionState.RUNNING)
        decoded = decode(raw, self._tools, self._repair, self._key_cap)
        if isinstance(decoded, CallError):
            return self._refuse(decoded)
        reply = await self._run(decoded)
        observation = self._read_answer(decoded, reply)
        if observation.stop is not None:
            return self._stopped(observation, observation.stop)
        state, failure = await self._state_digest()
        if failure is not None:
            return self._stopped(failure, Stop.ENV_ERROR)
        return self._watched(observation, raw.turn, state)

    async def verify(self, final_text: str) -> Verdict:
        """Judge the end state and the final answer. A verifier that fails or answers out of range
        gives ``correctness`` None and ``error``."""
        self._expect("verify", SessionState.RUNNING, SessionState.STOPPED)
        timeout_s = self.spec.verifier.timeout_s
        state = await self._request("end_state", {}, timeout_s)
        self._state = SessionState.VERIFIED
        if state.error is not None:
            return _no_verdict(f"end_state: {state.error} ({state.value})")
        reply = await self._verify_fn(
            {
                "final_text": final_text,
                "end_state": state.value,
                "data": self.spec.verifier.data,
            },
            timeout_s,
        )
        if reply.error is not None:
            return _no_verdict(f"verifier: {reply.error} ({reply.value})")
        return to_verdict(reply.value, self.spec)

    async def close(self) -> None:
        """Give the box back (or kill it). Idempotent; goes on when the caller is cancelled."""
        if self._closing is None:
            self._state = SessionState.CLOSED
            self._closing = asyncio.ensure_future(self._give_back())
        await asyncio.shield(self._closing)

    async def _give_back(self) -> None:
        try:
            if self._proxied is not None:
                await self._proxied.close()
        finally:
            if self._release is None:
                await self._box.kill()
            else:
                await self._release(self._box)

    async def _run(self, decoded: DecodedCall) -> Reply:
        """Run a call where its tool lives. Calls that run are numbered here and nowhere else."""
        index, self._num_calls = self._num_calls, self._num_calls + 1
        limits = self.spec.limits
        if self._proxied is not None and decoded.tool in self._proxied:
            return await self._proxied.call(decoded, index, limits.call_timeout_s)
        params = {
            "tool": decoded.tool,
            "arguments": decoded.arguments,
            "max_output_bytes": limits.max_output_bytes,
        }
        return await self._request("call", params, limits.call_timeout_s)

    async def _request(self, method: str, params: dict[str, Any], timeout_s: float) -> Reply:
        begin = time.perf_counter()
        reply = await self._box.request(
            method, {**params, "timeout_s": timeout_s}, timeout_s + GRACE_S
        )
        return Reply(reply.value, reply.error, time.perf_counter() - begin)

    def _expect(self, what: str, *allowed: SessionState) -> None:
        if self._state not in allowed:
            raise SandboxError(
                f"session {self.spec.name}: {what} in state {self._state.value!r}; allowed in "
                f"{', '.join(repr(state.value) for state in allowed)}"
            )

    def _stopped(self, observation: Observation, stop: Stop) -> Observation:
        self._state = SessionState.STOPPED
        return replace(observation, stop=stop)

    def _refuse(self, error: CallError) -> Observation:
        """A call that may not run: count it, remind once, stop at the limit."""
        text = error.message
        stop: Stop | None = None
        if error.code in ILLEGAL_CODES:
            self._num_illegal += 1
            if self._num_illegal >= ILLEGAL_STOP_AT:
                stop = Stop.ILLEGAL_CALL
        else:
            self._num_malformed += 1
            if self._num_malformed >= MALFORMED_STOP_AT:
                stop = Stop.PARSE_FAILURE
            elif self._num_malformed == MALFORMED_WARN_AT:
                left = MALFORMED_STOP_AT - self._num_malformed
                text += f"\nreminder: malformed calls end the task; {left} left"
        observation = Observation(text=text, error=error.code.value, tool=error.tool)
        return observation if stop is None else self._stopped(observation, stop)

    def _read_answer(self, decoded: DecodedCall, reply: Reply) -> Observation:
        """What the tool answered, in the words of its result schema."""
        limits = self.spec.limits
        text, error = _answer(decoded.tool, reply, limits.call_timeout_s)
        repairs, stop = decoded.repairs, None
        schema = self._tools.result_schema(decoded.tool)
        if schema is not None and error is None:
            if _CUT.search(text):
                error = "tool_error"
                text = (
                    f"tool_error: {decoded.tool} answered with more than "
                    f"{limits.max_output_bytes} bytes; ask for less"
                )
            else:
                aliases = self._tools[decoded.tool].result_aliases
                read = read_result(text, schema, aliases, self._tools.words)
                if isinstance(read, UnparsedResult):
                    text, error = f"unparsed_result: {read.message}", "unparsed_result"
                    stop = Stop.UNPARSED_RESULT
                elif read.repairs:
                    text, repairs = read.text, (*repairs, *read.repairs)
        return Observation(
            text=clip(text, limits.max_output_bytes),  # again: the box may not have kept its word
            error=error,
            repairs=repairs,
            elapsed_s=reply.elapsed_s,
            stop=stop,
            tool=decoded.tool,
            arguments=decoded.arguments,
        )

    async def _state_digest(self) -> tuple[str | None, Observation | None]:
        """(the task's state digest if it declares one, or what went wrong with it)."""
        function = self.spec.state_digest
        if function is None:
            return None, None
        timeout_s = self.spec.limits.call_timeout_s
        reply = await self._request("state_digest", {"function": function}, timeout_s)
        if reply.error is None:
            return str(reply.value), None
        text = f"env_error: state_digest {function} of {self.spec.name} failed: {reply.error} "
        return None, Observation(text=f"{text}({reply.value})", error="env_error")

    def _watched(
        self, observation: Observation, turn: int | None, state: str | None
    ) -> Observation:
        """The observation with what the loop detectors say about it."""
        assert observation.tool is not None and observation.arguments is not None, observation
        verdict = self._loops.record(
            observation.tool,
            observation.arguments,
            observation.text,
            error=None if observation.error is None else observation.text,
            infra=observation.error == "infra_error",
            state=state,
            time_s=time.monotonic(),
            turn=turn,
        )
        if verdict is None:
            return observation
        observation = replace(
            observation,
            text=f"{observation.text}\n{verdict.reminder}",
            loop=f"{verdict.detector}:{verdict.action.value}",
            loop_span=verdict.span,
        )
        if verdict.action is LoopAction.STOP:
            return self._stopped(observation, Stop.INFRA_ERROR if verdict.infra else Stop.LOOP)
        return observation


def _answer(tool: str, reply: Reply, timeout_s: float) -> tuple[str, str | None]:
    """Text for the model and error class of a call that ran."""
    match reply.error:
        case None:
            return str(reply.value), None
        case "tool_error":
            if is_infra_error(str(reply.value)):
                return f"infra_error: {reply.value}", "infra_error"
            return f"tool_error: {reply.value}", "tool_error"
        case "infra_error":
            return f"infra_error: {reply.value}", "infra_error"
        case "refused":
            return f"tool_error: {reply.value}", "tool_error"
        case "timeout":
            return f"tool_error: {tool} did not answer within {timeout_s:g} s", "tool_error"
        case "died":
            why = "exit, crash, out of memory or limits"
            return f"tool_error: {tool} ended its process ({why})", "tool_error"
    return f"tool_error: {tool} failed inside ({reply.value})", "tool_error"


def to_verdict(answer: Any, spec: TaskSpec) -> Verdict:
    """Check a verifier's raw answer ``{"correctness": float, "reasons": [...], ...}``."""
    if not isinstance(answer, dict) or "correctness" not in answer:
        return _no_verdict(f"verifier answered {answer!r:.80}; expected a dict with 'correctness'")
    correctness = answer["correctness"]
    if isinstance(correctness, bool) or not isinstance(correctness, int | float):
        return _no_verdict(f"correctness is {correctness!r:.80}; expected a number")
    if not (math.isfinite(correctness) and 0.0 <= correctness <= 1.0):
        return _no_verdict(f"correctness is {correctness!r:.80}; expected [0, 1]")
    reasons = answer.get("reasons", [])
    if not isinstance(reasons, list):
        return _no_verdict(f"reasons is {reasons!r:.80}; expected a list of strings")
    return Verdict(
        correctness=float(correctness),
        passed=correctness >= spec.pass_threshold,
        reasons=tuple(str(reason) for reason in reasons),
        details={k: v for k, v in answer.items() if k not in ("correctness", "reasons")},
    )


def _no_verdict(error: str) -> Verdict:
    return Verdict(correctness=None, passed=False, error=error)
