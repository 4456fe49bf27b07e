"""Supervised start from oracle demonstrations: clean transcripts first, then mostly sloppy ones.

The sloppy part teaches the habits RL is to unlearn (thinking aloud, asking twice, guessing), on top
of a policy that can already do the task; sloppy alone leaves RL nothing to find.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
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


Written = Callable[[int, int], None]
"""(instances written, instances in all)"""
Demonstrations = tuple[list[TrainingSample], list[TrainingSample]]
"""(clean, sloppy) transcripts of the same training instances."""


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
        self._ahead: Future[Demonstrations] | None = None

    def write_ahead(self, written: Written) -> None:
        """Begin to write the demonstrations in a thread, while a cluster starts; the call waits
        for them."""
        if self._ahead is None and self._num_steps:
            self._ahead = Future()
            # not a pool's thread: an interrupted start must not wait for it
            threading.Thread(
                target=self._write_ahead, args=(self._ahead, written), daemon=True
            ).start()

    def _write_ahead(self, result: Future[Demonstrations], written: Written) -> None:
        try:
            result.set_result(self._write(written))
        except BaseException as error:  # raised again where the result is asked for
            result.set_exception(error)

    def __call__(self, learner: SupervisedLearner, report: Report) -> dict[str, float]:
        """``report(done, total, loss)`` after each step."""
        config = self._config
        total = self._num_steps
        clean, rough = self.demonstrations() if total else ([], [])
        rng = random.Random(f"warm-start/{self._seed}")
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

    def demonstrations(self) -> Demonstrations:
        """Those of ``write_ahead``, or written now."""
        return self._write(lambda *_: None) if self._ahead is None else self._ahead.result()

    @property
    def _num_steps(self) -> int:
        return self._config.clean_steps + self._config.sloppy_steps

    def _write(self, written: Written) -> Demonstrations:
        tasks = self._tasks(self._config.num_demonstrations)
        habits = Sloppiness(self._config.filler, self._config.redundant, self._config.guess)

        async def write() -> Demonstrations:
            clean: list[TrainingSample] = []
            rough: list[TrainingSample] = []
            for index, task in enumerate(tasks):
                plan = self._plan(task)
                rng = random.Random(f"sloppy/{self._seed}/{index}")
                clean.append(await self._transcribe(task, plan, index))
                rough.append(await self._transcribe(task, sloppy(plan, habits, rng), index))
                written(index + 1, len(tasks))
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
