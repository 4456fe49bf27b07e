"""What the reward remembers between updates: a value that goes to JSON and back exactly."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from reward_models.gate import GateState


@dataclass(frozen=True, slots=True)
class TypeState:
    """One task type. ``correct_tokens``: lengths of recent correct episodes, oldest first;
    ``fits``: whether each kept its budget; ``minimum`` and ``reference``: m and L_ref in force."""

    gate: GateState = field(default_factory=GateState)
    correct_tokens: tuple[int, ...] = ()
    fits: tuple[bool, ...] = ()
    minimum: float | None = None
    reference: float | None = None
    guarded: bool = False
    """The feasibility guard suspends the budget."""


@dataclass(frozen=True, slots=True)
class RewardState:
    """``open_streak``: consecutive updates in which enough types were open."""

    stage: int = 0
    open_streak: int = 0
    types: dict[str, TypeState] = field(default_factory=dict[str, TypeState])

    def is_open(self, task_type: str) -> bool:
        state = self.types.get(task_type)
        return state is not None and state.gate.open

    def of(self, task_type: str) -> TypeState:
        return self.types.get(task_type, TypeState())

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> RewardState:
        data: dict[str, Any] = json.loads(text)
        types = {
            name: TypeState(
                gate=GateState(row["gate"]["open"], tuple(row["gate"]["recent"])),
                correct_tokens=tuple(row["correct_tokens"]),
                fits=tuple(row["fits"]),
                minimum=row["minimum"],
                reference=row["reference"],
                guarded=row["guarded"],
            )
            for name, row in data["types"].items()
        }
        return RewardState(data["stage"], data["open_streak"], types)
