"""Bodies of requests and answers, and the response class that can carry any model's text."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema

from sandbox.calls.policy import RepairMode
from sandbox.session import Observation, SessionState, Stop, Verdict

MAX_SEED = 2**53 - 1
"""Larger integers do not survive every JSON reader, nor the bounds of an OpenAPI document."""


class AsciiJSON(JSONResponse):
    """JSON in ASCII: half a surrogate pair, which a model may write, has no UTF-8 form."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=True, allow_nan=False).encode("ascii")


class Body(BaseModel):
    """A request body: unknown keys and other types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _whole(value: Any) -> Any:
    """JSON Schema takes 5.0 for an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]


class FamilyTask(Body):
    """An instance of a shipped family."""

    family: str = Field(pattern=r"^[a-z0-9_]{1,64}$", examples=["lookup_calc"])
    task_type: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", examples=["add"])
    seed: Whole = Field(default=0, ge=0, le=MAX_SEED)
    index: Whole = Field(default=0, ge=0, le=2**31 - 1)
    split: Literal["train", "heldout"] = "train"


class FolderTask(Body):
    """A certified task folder below one of the server's task roots."""

    folder: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


def _has(key: str, yes: str, no: str) -> Discriminator:
    """Which shape a value means to be, so that its errors are about that one."""

    def tag(value: Any) -> str:
        keys = type(value).model_fields if isinstance(value, Body) else value
        return yes if isinstance(keys, dict) and key in keys else no

    return Discriminator(tag)


Task = Annotated[
    Annotated[FamilyTask, Tag("family")] | Annotated[FolderTask, Tag("folder")],
    _has("folder", "folder", "family"),
]


class CreateSession(Body):
    """``owner``: an episode id, kept in the box's lease."""

    task: Task
    ttl_s: Annotated[float, Field(ge=1.0, le=86400.0)] | SkipJsonSchema[None] = None
    """Longest silence of the client; default and most are the server's."""
    owner: str = Field(default="", max_length=200)
    repair: Literal["off", "strict", "cost"] = RepairMode.COST.value


class VerifySession(Body):
    final_text: str


class FunctionCall(Body):
    name: str
    arguments: str


class OpenAICall(Body):
    """A ``tool_calls`` entry of an OpenAI message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    turn: Whole | None = Field(default=None, ge=0, le=10**9)
    finish_reason: str | None = Field(default=None, max_length=64)


class TextCall(Body):
    """A call exactly as the model wrote it."""

    name_text: str
    arguments_text: str
    turn: Whole | None = Field(default=None, ge=0, le=10**9)
    """Number of the assistant turn; calls of one turn are parallel."""
    finish_reason: str | None = Field(default=None, max_length=64)


ToolCall = Annotated[
    Annotated[TextCall, Tag("text")] | Annotated[OpenAICall, Tag("openai")],
    _has("function", "openai", "text"),
]


class ErrorBody(BaseModel):
    """Every answer that is not 2xx. ``infra``: the infrastructure failed, so that no episode may
    get a reward from this, not even 0."""

    error: str
    message: str
    infra: bool = False


class ObservationBody(BaseModel):
    """What the model reads next (``text``) and what became of the call. ``stop`` set: the episode
    is over."""

    text: str
    error: str | None
    repairs: list[str]
    loop: str | None
    loop_span: list[int] | None
    elapsed_s: float
    stop: Stop | None
    tool: str | None
    arguments: dict[str, Any] | None
    tool_call_id: str | None


class AgentLimits(BaseModel):
    max_turns: int
    max_tokens_per_turn: int | None
    timeout_s: float
    call_timeout_s: float
    max_output_bytes: int


class AgentTask(BaseModel):
    """``tools``: OpenAI function declarations. ``open``: whether calls are still taken."""

    instruction: str
    tools: list[dict[str, Any]]
    limits: AgentLimits
    open: bool
    stop: Stop | None


class VerdictBody(BaseModel):
    """``correctness`` null: the verifier failed (``error`` says how), which is no reward."""

    correctness: float | None
    passed: bool
    reasons: list[str]
    error: str | None
    details: dict[str, Any]


class LoopBody(BaseModel):
    """Detector and action of one loop verdict; ``call`` counts the calls of the session from 1."""

    call: int
    verdict: str
    span: list[int] | None


class SessionBody(BaseModel):
    """What the orchestrator sees of a session. ``num_waiting``: requests that run or
    wait for their turn. ``lost``: the last words of a box that died.
    ``closed_because``: "client", "ttl" or "shutdown"."""

    id: str
    task: dict[str, Any]
    name: str
    task_type: str
    content_hash: str
    owner: str
    state: SessionState
    level: str
    enforced: dict[str, Any]
    start_error: str | None
    num_calls: int
    num_waiting: int
    errors: dict[str, int]
    repairs: dict[str, int]
    loops: list[LoopBody]
    stop: Stop | None
    verdict: VerdictBody | None
    lost: str | None
    created_at: float
    ttl_s: float
    idle_s: float
    closed_because: str | None


class CreatedBody(BaseModel):
    """``agent_token`` opens the agent door for this session until it closes."""

    agent_token: str
    session: SessionBody


class SessionList(BaseModel):
    """Newest first; ``total`` counts what the filter matched."""

    sessions: list[SessionBody]
    total: int


class PoolBody(BaseModel):
    bundle: str
    level: str
    in_use: int
    opened: int
    lent: int
    dirty: int
    lost: int


class PoolStatus(BaseModel):
    capacity: int
    in_use: int
    pools: list[PoolBody]


class Health(BaseModel):
    status: Literal["ok", "starting", "stopping"]


def observation_body(seen: Observation, tool_call_id: str | None = None) -> dict[str, Any]:
    """An Observation as ``ObservationBody``."""
    assert not seen.media, "no tool answers with media yet; ObservationBody needs a field for it"
    return {
        "text": seen.text,
        "error": seen.error,
        "repairs": list(seen.repairs),
        "loop": seen.loop,
        "loop_span": None if seen.loop_span is None else list(seen.loop_span),
        "elapsed_s": seen.elapsed_s,
        "stop": seen.stop,
        "tool": seen.tool,
        "arguments": seen.arguments,
        "tool_call_id": tool_call_id,
    }


def verdict_body(verdict: Verdict) -> dict[str, Any]:
    """A Verdict as ``VerdictBody``."""
    return {
        "correctness": verdict.correctness,
        "passed": verdict.passed,
        "reasons": list(verdict.reasons),
        "error": verdict.error,
        "details": finite(verdict.details),
    }


def finite(value: Any) -> Any:
    """``value`` with NaN and infinities spelt out: JSON has no number for them."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
