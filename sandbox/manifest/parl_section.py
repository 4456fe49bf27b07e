"""``[metadata.parl]``: what PARL adds to a Harbor task (facts/sandboxes.md 1.2)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sandbox.tool_spec import Effect, KeyRepair


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class PollSection(_Section):
    """A declared poll: equal results are no loop when spaced by ``min_interval_s``."""

    min_interval_s: float = Field(ge=0)
    max: int = Field(gt=0)


class LoopSection(_Section):
    poll: PollSection | None = None
    cursor_args: list[str] = []
    ignore_args: list[str] = []
    ignore_result: list[str] = []


class ToolSection(_Section):
    """``[metadata.parl.tools.NAME]``; a key that is set wins over the ``@tool`` decorator."""

    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, alias="schema")
    """JSON Schema of the arguments; default: derived from the function's signature."""
    effect: Effect | None = None
    idempotent: bool | None = None
    aliases: list[str] = []
    """Other names of the tool."""
    key_aliases: dict[str, list[str]] = {}
    """Argument name -> other spellings of it."""
    result: dict[str, Any] | None = None
    """JSON Schema of the answer; an answer that does not fit it ends the episode."""
    result_aliases: dict[str, list[str]] = {}
    """Key of the answer -> other spellings of it."""
    loop: LoopSection | None = None
    cache: bool = False
    ttl_s: float | None = Field(default=None, gt=0)
    rate: float | None = Field(default=None, gt=0)
    """Calls per second."""


class BudgetSection(_Section):
    """Limits of one episode and the units its length budget is counted in."""

    units: dict[str, float] = {}
    """E.g. ``{calls = 3}``; the stage-0 budget is a function of these."""
    max_turns: int = Field(default=32, gt=0)
    max_tokens_per_turn: int | None = Field(default=None, gt=0)
    max_output_bytes: int = Field(default=65536, gt=0)
    setup_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that building an episode's world may take."""
    """Longest observation; the rest is cut with a marker."""
    call_timeout_s: float = Field(default=10.0, gt=0, le=3600)


class ParlSection(_Section):
    task_type: str = Field(min_length=1)
    """Key of the accuracy gate."""
    family: str | None = None
    min_tokens: int | None = Field(default=None, gt=0)
    """Fewest tokens a correct solution needs (author's estimate, later measured)."""
    reward_range: list[float] = Field(default=[0.0, 1.0], min_length=2, max_length=2)
    pass_threshold: float = 1.0
    determinism: Literal["seeded", "stochastic", "unknown"] = "seeded"
    seed: int = 0
    state_digest: str | None = None
    """Function of tools.py whose value tells progress from a loop."""
    key_repair: KeyRepair = "fuzzy"
    """How far argument keys may be matched at most; the run's mode and the tool's effect may allow
    less."""
    forbidden_tools: list[str] = []
    """Tools that exist in the world but may not be called."""
    packages: list[str] = []
    """Pure-Python distributions that tools.py may import in the box."""
    tools: dict[str, ToolSection] = {}
    proxy: dict[str, Any] = {}
    budget: BudgetSection = BudgetSection()
