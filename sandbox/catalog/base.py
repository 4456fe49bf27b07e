"""Family: a generator of task instances that share code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from sandbox.session import RawCall
from sandbox.task import TaskSpec, ToolBundle

Split = Literal["train", "heldout"]


@dataclass(frozen=True, slots=True)
class Oracle:
    """A correct solution: rounds of tool calls (a round = one turn), then the final answer."""

    rounds: tuple[tuple[RawCall, ...], ...]
    final_text: str


class Family(Protocol):
    """Instances are pure functions of (seed, index, split, task_type)."""

    @property
    def name(self) -> str: ...

    @property
    def task_types(self) -> tuple[str, ...]: ...

    @property
    def bundle(self) -> ToolBundle: ...

    def instance(self, seed: int, index: int, split: Split, task_type: str) -> TaskSpec:
        """Instance ``index`` of a split; TaskError for an unknown split or type."""
        ...

    def oracle(self, spec: TaskSpec) -> Oracle:
        """How to solve an instance of this family."""
        ...
