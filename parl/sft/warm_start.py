"""Supervised start from oracle demonstrations: clean transcripts first, then mostly sloppy ones.

The sloppy part teaches the habits RL is to unlearn (thinking aloud, asking twice, guessing), on top
of a policy that can already do the task; sloppy alone leaves RL nothing to find.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.chat.renderer import KimiRenderer
from parl.config import WarmStartSection
from parl.rollout.chat import Chat
from parl.sft.transcripts import Plan, PlannedTurn, Sloppiness, sloppy, transcribe
from parl.trajectory import TrainingSample
from sandbox.calls.table import ToolTable
from sandbox.catalog.base import Family
from sandbox.fakes import InProcessSession
from sandbox.task import TaskSpec

Report = Callable[[int, int, float], None]
"""(steps done, steps in all, loss of the last one in nats per token)"""


class SupervisedLearner(Protocol):
    """What a warm start needs of parl.rounds.ports.LearnerPort; the rounds import this room."""

    def sft_update(
        self, samples: Sequence[TrainingSample], muon_lr: float, adamw_lr: float
    ) -> dict[str, float]:
        """One cross-entropy step on the tokens whose loss_mask is 1; metrics hold ``loss``."""
        ...

    def reset_optimizers(self) -> None:
        """Forget momentum and go back to the configured rates."""
        ...


class WarmStart:
    """Call with a learner to train it; a pure function of config, tasks and seed."""

    def __init__(
        self,
        config: WarmStartSection,
        *,
        family: Family,
        tasks: Callable[[int], list[TaskSpec]],
        chat: Chat,
        renderer: KimiRenderer,
        seed: int,
    ) -> None:
        self._config = config
        self._family = family
        self._tasks = tasks
        self._chat = chat
        self._renderer = renderer
        self._seed = seed
        self._tables: dict[tuple[str, str], ToolTable] = {}

    def __call__(self, learner: SupervisedLearner, report: Report) -> dict[str, float]:
        """``report(done, total, loss)`` after each step."""
        config = self._config
        clean, rough = self.demonstrations()
        rng = random.Random(f"warm-start/{self._seed}")
        total = config.clean_steps + config.sloppy_steps
        metrics: dict[str, float] = {}
        for step in range(total):
            first = step < config.clean_steps
            share = config.early_sloppy_share if first else config.sloppy_share
            batch = [
                rng.choice(rough if rng.random() < share else clean)
                for _ in range(config.batch_size)
            ]
            scale = self._scale(step)
            metrics = learner.sft_update(batch, config.muon_lr * scale, config.adamw_lr * scale)
            report(step + 1, total, metrics["loss"])
        # RL starts with fresh momentum: the demonstrations' direction is not the reward's
        learner.reset_optimizers()
        return metrics

    def demonstrations(self) -> tuple[list[TrainingSample], list[TrainingSample]]:
        """(clean, sloppy) transcripts of the same training instances."""
        tasks = self._tasks(self._config.num_demonstrations)
        habits = Sloppiness(self._config.filler, self._config.redundant, self._config.guess)

        async def write() -> tuple[list[TrainingSample], list[TrainingSample]]:
            clean: list[TrainingSample] = []
            rough: list[TrainingSample] = []
            for index, task in enumerate(tasks):
                plan = self._plan(task)
                rng = random.Random(f"sloppy/{self._seed}/{index}")
                clean.append(await self._transcribe(task, plan, index))
                rough.append(await self._transcribe(task, sloppy(plan, habits, rng), index))
            return clean, rough

        return asyncio.run(write())

    def _scale(self, step: int) -> float:
        """Each part decays linearly to zero over its last ``decay_share``; the second part runs at
        ``sloppy_rate`` of the first's rates."""
        config = self._config
        if step < config.clean_steps:
            done, total, peak = step, config.clean_steps, 1.0
        else:
            done, total = step - config.clean_steps, config.sloppy_steps
            peak = config.sloppy_rate
        tail = max(config.decay_share * total, 1e-9)
        return peak * min(1.0, (total - done) / tail)

    def _plan(self, task: TaskSpec) -> Plan:
        oracle = self._family.oracle(task)
        turns = tuple(
            PlannedTurn("", tuple((_tool(c.name_text), c.arguments_text) for c in calls))
            for calls in oracle.rounds
        )
        return Plan(turns, oracle.final_text)

    def _table(self, task: TaskSpec) -> ToolTable:
        """Schemas are compiled once per set of tools, not once per instance."""
        key = (task.task_type, task.bundle)
        if key not in self._tables:
            self._tables[key] = ToolTable(task.tools, task.forbidden_tools)
        return self._tables[key]

    async def _transcribe(self, task: TaskSpec, plan: Plan, index: int) -> TrainingSample:
        # shipped families are trusted code: no box is needed to hear their own tools answer
        session = InProcessSession(task, self._family.bundle, self._table(task))
        prompt = self._chat.prompt(task).tolist()
        return await transcribe(plan, session, self._renderer, prompt, index)


def lean_tokens(samples: Sequence[TrainingSample]) -> int:
    """Fewest trained tokens of a demonstration."""
    return min(int(sample.loss_mask.sum()) for sample in samples)


def _tool(name_text: str) -> str:
    return name_text.removeprefix("functions.").rsplit(":", 1)[0]
