"""Which task instances a round runs: a pure function of (seed, round, position), never of a loader.

The cursor is the round index, so resume needs no memory: round r takes the instances
[r * num_prompts, (r + 1) * num_prompts) of each type's own sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from infra.errors import ConfigError
from sandbox.catalog.base import Split
from sandbox.task import TaskSpec

FIRST_DEMONSTRATION = 1_000_000
"""About where the warm start's instances begin (a multiple of their number)."""


class TaskFamily(Protocol):
    """A catalog family: draws instances from a seed."""

    @property
    def task_types(self) -> tuple[str, ...]: ...

    def instance(self, seed: int, index: int, split: Split, task_type: str) -> TaskSpec: ...


class TaskSource:
    """Instances of one family in the configured mix."""

    def __init__(
        self,
        family: TaskFamily,
        mix: Mapping[str, float],
        seed: int,
        num_prompts: int,
        min_tokens: Mapping[str, int] | None = None,
        units: Callable[[TaskSpec], dict[str, float]] | None = None,
    ) -> None:
        """``min_tokens`` by task type replaces the author's estimate, which depends on the
        tokenizer. ``units`` counts the budget units of a task that says none."""
        unknown = sorted(set(mix) - set(family.task_types))
        if unknown:
            raise ConfigError(
                f"tasks.mix names {', '.join(unknown)}, which this family does not have; "
                f"expected some of: {', '.join(family.task_types)}"
            )
        if not any(share > 0 for share in mix.values()) or min(mix.values()) < 0:
            raise ConfigError(f"tasks.mix is {dict(mix)}; expected shares >= 0, one of them > 0")
        self._family = family
        self._mix = dict(mix)
        self._seed = seed
        self._min_tokens = dict(min_tokens or {})
        self._units = units or (lambda task: {})
        self.num_prompts = num_prompts

    def train(self, round_index: int) -> list[TaskSpec]:
        """The prompts of one RL round, types interleaved."""
        return self._draw("train", self.num_prompts, round_index)

    def heldout(self, count: int) -> list[TaskSpec]:
        """The first ``count`` held-out instances; the same ones at every evaluation."""
        return self._draw("heldout", count, 0)

    def demonstrations(self, count: int) -> list[TaskSpec]:
        """Training instances for the warm start, from a part of the sequence no round reaches."""
        return self._draw("train", count, max(1, FIRST_DEMONSTRATION // max(count, 1)))

    def _draw(self, split: Split, count: int, block: int) -> list[TaskSpec]:
        order = interleave(quotas(self._mix, count))
        tasks = [
            self._family.instance(self._seed, block * count + position, split, task_type)
            for position, task_type in enumerate(order)
        ]
        return [
            replace(
                task,
                min_tokens=self._min_tokens.get(task.task_type, task.min_tokens),
                budget_units=task.budget_units or self._units(task),
            )
            for task in tasks
        ]


def quotas(mix: Mapping[str, float], count: int) -> dict[str, int]:
    """Largest-remainder split of ``count`` by share; ties go to the type named first."""
    total = sum(mix.values())
    exact = {name: share / total * count for name, share in mix.items()}
    result = {name: int(value) for name, value in exact.items()}
    rest = count - sum(result.values())
    for name in sorted(mix, key=lambda n: -(exact[n] - result[n]))[:rest]:
        result[name] += 1
    return result


def interleave(counts: Mapping[str, int]) -> list[str]:
    """Spread types evenly, so that any prefix has about the mix of the whole."""
    slots = [
        ((2 * i + 1) / (2 * n), order, name)
        for order, (name, n) in enumerate(counts.items())
        for i in range(n)
    ]
    return [name for _, _, name in sorted(slots)]
