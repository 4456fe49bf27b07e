"""What the reward remembers between updates: a value that goes to JSON and back exactly."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from reward_models.gate import GateState


@dataclass(frozen=True, slots=True)
class TypeState:
    """One task type. Windows hold recent correct episodes, oldest first."""

    gate: GateState = field(default_factory=GateState)
    correct_tokens: tuple[int, ...] = ()
    """Lengths T."""
    correct_rates: tuple[float, ...] = ()
    """T/u, u being the size of the task (1 when it names no known unit)."""
    fits: tuple[bool, ...] = ()
    """Whether each kept its budget, enforced or not."""
    minimum: float | None = None
    """T/u below which the efficiency floor lies; frozen while it is in force."""
    reference: float | None = None
    """L_ref, running."""
    guarded: bool = False
    """The feasibility guard suspends the budget."""
    fallback: float | None = None
    """T/u of the budget that stands in for a guarded one; measured when the guard stepped in."""
    given_up: tuple[bool, ...] = ()
    """Whether each recent scored episode gave up, oldest first."""
    given_up_at_first: float | None = None
    """Their rate when the gate first opened."""


@dataclass(frozen=True, slots=True)
class RewardState:
    """``open_streak``: consecutive updates in which enough types were open."""

    stage: int = 0
    open_streak: int = 0
    num_updates: int = 0
    types: dict[str, TypeState] = field(default_factory=dict[str, TypeState])

    def is_open(self, task_type: str) -> bool:
        state = self.types.get(task_type)
        return state is not None and state.gate.open

    def of(self, task_type: str) -> TypeState:
        return self.types.get(task_type, TypeState())

    def in_force(self, task_type: str) -> bool:
        """Correct answers of this type earn efficiency now."""
        return self.stage == 1 and self.is_open(task_type)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> RewardState:
        """Exact inverse of ``to_json``."""
        data: dict[str, Any] = json.loads(text)
        types = {
            name: TypeState(
                gate=GateState(row["gate"]["open"], tuple(row["gate"]["recent"])),
                correct_tokens=tuple(row["correct_tokens"]),
                correct_rates=tuple(row["correct_rates"]),
                fits=tuple(row["fits"]),
                minimum=row["minimum"],
                reference=row["reference"],
                guarded=row["guarded"],
                fallback=row["fallback"],
                given_up=tuple(row["given_up"]),
                given_up_at_first=row["given_up_at_first"],
            )
            for name, row in data["types"].items()
        }
        return RewardState(data["stage"], data["open_streak"], data["num_updates"], types)
