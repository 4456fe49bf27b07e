"""What the engine thread does: steps, forks, weight swaps, batches, sampling. Single-threaded.

A weight swap waits until the running steps have ended and holds back those that begin later, so a
StepResult has exactly one weight version.
"""

from __future__ import annotations

import math
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from engine.chat.vocabulary import Vocabulary
from engine.config import EngineConfig
from engine.errors import CapacityError, ContextLost, EngineError, WeightsError
from engine.light.context import Context, WaitingFork
from engine.light.debug import PartClock
from engine.light.rows import Plan
from engine.light.runner import RowBatch, new_runner, settled
from engine.light.steps import Call, Steps, told
from engine.light.tables import TextOf, new_table
from engine.model.config import ModelConfig
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    FinishReason,
    StepResult,
    WeightSet,
)


@dataclass(frozen=True, slots=True)
class Usage:
    weight_version: int
    weight_checksum: str
    num_contexts: int
    kv_bytes_used: int
    kv_bytes_total: int


class Scheduler:
    """Every method runs on the engine thread."""

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        text_of: TextOf | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        if config.max_context > model_config.max_position_embeddings:
            raise CapacityError(
                f"engine.max_context={config.max_context} exceeds the model's "
                f"max_position_embeddings={model_config.max_position_embeddings}; lower it"
            )
        config = settled(model_config, config)
        self._config = config
        self._has_experts = model_config.num_moe_layers > 0
        self._runner = new_runner(model_config, config)
        self.contexts = new_table(model_config, config, text_of)
        self._loads: deque[tuple[WeightSet, Future[int]]] = deque()
        self._epoch = 0
        self._num_batches = 0
        self._num_begun = 0
        self._steps = Steps(
            model_config.vocab_size, config.max_context, config.seed, vocabulary, self._runner.draw
        )
        self._deadline = math.inf
        """The next one of a running step, or earlier."""

    # -- commands -------------------------------------------------------------------------------

    def begin_step(self, call: Call) -> None:
        """``call.future`` resolves when the step ends."""
        context = self.contexts.idle(call.request.ctx, "forward_step")
        if self._runner.weight_version < 0 and not self._loads:
            raise WeightsError("this engine has no weights yet; call load_weights before a step")
        self._steps.check(call.request)
        if call.request.debug:
            self.contexts.check_debug()
        length = len(context.tokens)
        if length >= self._config.max_context:
            raise CapacityError(
                f"context holds {length} tokens, engine.max_context is "
                f"{self._config.max_context}: no room for a new one"
            )
        assert context.todo[-1] == length - 1, "the last token of an idle context was fed already"
        context.step = self._steps.begin(context, call, self._epoch + len(self._loads))
        self._deadline = min(self._deadline, context.step.deadline)
        self._queue(context)

    def cancel(self, ctx: ContextId) -> None:
        context = self.contexts.get(ctx)
        if context is not None and context.step is not None:
            self._finish(context, "cancelled")

    def release(self, ctx: ContextId) -> None:
        """Also ends a step, forks that wait for the context, and a waiting fork named ``ctx``."""
        context = self.contexts.get(ctx)
        if context is None:
            self._drop_waiting_fork(ctx)
            return
        if context.step is not None:
            self._finish(context, "cancelled")
        for fork in context.forks:
            fork.future.set_exception(
                ContextLost(f"context {ctx} was released while a fork of it waited")
            )
        self.contexts.close(context)

    def _drop_waiting_fork(self, child: ContextId) -> None:
        for parent in self.contexts:
            for fork in [fork for fork in parent.forks if fork.child == child]:
                parent.forks.remove(fork)
                fork.future.set_exception(ContextLost(f"context {child} was released"))

    def begin_fork(
        self,
        ctx: ContextId,
        child: ContextId,
        policy: ContextPolicy | None,
        future: Future[None],
    ) -> None:
        """``future`` resolves when the child exists. Forks of one parent may overlap; the first
        waits until all but the parent's last token is computed, so that no child does it again."""
        parent = self.contexts.get(ctx)
        if parent is None or not parent.forks:
            parent = self.contexts.idle(ctx, "fork")
        fork = WaitingFork(child, policy, future)
        if parent.num_prefill and self._runner.weight_version >= 0:
            parent.forks.append(fork)
            self._queue(parent)
        else:
            self._fork(parent, fork)

    def load_weights(self, weights: WeightSet, future: Future[int]) -> None:
        """Checks now; ``future`` resolves to the version when the swap is done."""
        self._runner.check(weights)
        self._loads.append((weights, future))

    def load_now(self, weights: WeightSet) -> None:
        """For a fresh engine, before its thread starts."""
        self._runner.check(weights)
        self._runner.load(weights)

    def usage(self) -> Usage:
        return Usage(
            self._runner.weight_version,
            self._runner.weight_checksum,
            len(self.contexts),
            self.contexts.used_bytes,
            self.contexts.total_bytes,
        )

    # -- the batch ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._loads) or any(not context.is_idle for context in self.contexts)

    def step(self) -> None:
        """Compute one batch of rows and hand out what it finished."""
        if self._deadline < math.inf:
            self._end_late_steps()
        self._swap_weights()
        for piece in self._pieces(self._plan()):
            self._compute(piece)

    def _pieces(self, plan: Plan) -> list[Plan]:
        """``plan`` as it is computed, see EngineConfig.split_batches; none of an empty one."""
        size = self._config.split_batches
        if not size or len(plan) <= 2 * size:
            return [plan] if plan else []
        return [plan[i : i + size] for i in range(0, len(plan), size)]

    def _compute(self, plan: Plan) -> None:
        watched = [c.step.debug for c, _ in plan if c.step is not None and c.step.debug is not None]
        clock = PartClock() if watched else None
        batch, sampling = self._pack(plan, clock)
        output = self._runner.run(batch)
        start = 0
        for index, (context, rows) in enumerate(plan):
            end = start + len(rows)
            reads = output.reads
            selections = None if reads is None else reads.selections[start:end]
            context.record(rows, output.experts[start:end], selections)
            if reads is not None:
                context.warm_reads += int(reads.warm[start:end].sum())
                context.retrieved += int(reads.retrieved[start:end].sum())
                if context.codes is not None:
                    context.codes.update(reads.codes.get(index, {}))
            context.served = self._num_batches
            del context.todo[: len(rows)]
            if output.bad_rows is not None and output.bad_rows[start:end].any():
                self._give_up(context)
            start = end
        healthy = [i for i, context in enumerate(sampling) if context.step is not None]
        if healthy:
            chosen = [sampling[i] for i in healthy]
            # indexing copies some MB
            logits = output.logits if len(healthy) == len(sampling) else output.logits[healthy]
            version = self._runner.weight_version
            ended = self._steps.sample(chosen, logits, version)
            if clock is not None:
                _tell_time(plan, clock)
            for context, reason in ended:
                self._finish(context, reason)
        elif clock is not None:
            _tell_time(plan, clock)
        for context, _ in plan:
            if context.forks and not context.num_prefill:
                waiting, context.forks = context.forks, []
                for fork in waiting:
                    self._fork(context, fork)

    def _end_late_steps(self) -> None:
        now = time.monotonic()
        if now < self._deadline:
            return
        self._deadline = math.inf
        for context in self.contexts:
            if context.step is None:
                continue
            if context.step.deadline <= now:
                self._finish(context, "deadline")
            else:
                self._deadline = min(self._deadline, context.step.deadline)

    def _swap_weights(self) -> None:
        while self._loads and not any(self._is_running(context) for context in self.contexts):
            weights, future = self._loads.popleft()
            self._runner.load(weights)
            self.contexts.forget_computed()
            self._epoch += 1
            future.set_result(self._runner.weight_version)

    def _is_running(self, context: Context) -> bool:
        return context.step is not None and context.step.epoch == self._epoch

    def _plan(self) -> Plan:
        """Rows of the longest-waiting contexts first, decode before prefill among equals, while
        ``max_rows`` lasts."""
        ready = [c for c in self.contexts if self._is_running(c) or (c.forks and c.num_prefill)]
        for context, error in self.contexts.before_batch(ready):
            self._fail(context, error)
            ready.remove(context)
        ready.sort(key=lambda c: (-c.policy.priority, c.served, len(c.todo) > 1))
        room = self._config.max_rows
        self.contexts.begin_batch()
        plan: Plan = []
        blocked: list[Context] = []
        for context in ready:
            rows = context.next_rows(room)
            try:
                self.contexts.cover(context, rows)
            except CapacityError:
                blocked.append(context)
                continue
            plan.append((context, rows))
            room -= len(rows)
            if not room:
                break
        self._num_batches += 1
        return plan if plan or not blocked else self._preempt(blocked)

    def _preempt(self, blocked: list[Context]) -> Plan:
        """Nobody can go on: the context that began first takes blocks from steps that wait for a
        weight swap, then from those that began after it."""
        first, *others = sorted(blocked, key=lambda c: c.began)
        rows = first.next_rows(self._config.max_rows)
        held_back = [c for c in self.contexts if c.step is not None and not self._is_running(c)]
        victims = [*held_back, *reversed(others)]
        self.contexts.make_room(first, rows, victims)
        try:
            self.contexts.cover(first, rows)
        except CapacityError as error:
            self._fail(first, error)
            return []
        return [(first, rows)]

    def _pack(self, plan: Plan, clock: PartClock | None) -> tuple[RowBatch, list[Context]]:
        """The batch, and the contexts of its ``sampled_rows``."""
        positions: list[int] = []
        ids: list[int] = []
        sampled_rows: list[int] = []
        sampling: list[Context] = []
        for context, rows in plan:
            positions += rows
            ids += [context.tokens[p] for p in rows]
            if context.step is not None and len(rows) == len(context.todo):
                sampled_rows.append(len(positions) - 1)
                sampling.append(context)
        batch = RowBatch(
            np.array(ids, np.int64),
            np.array(positions, np.int64),
            self.contexts.rows(plan, clock),
            np.array(sampled_rows, np.int64),
        )
        return batch, sampling

    # -- ends -----------------------------------------------------------------------------------

    def _queue(self, context: Context) -> None:
        self._num_begun += 1
        context.began = self._num_begun
        # as if served just now: behind those that wait, beside those that decode
        context.served = self._num_batches

    def _finish(self, context: Context, reason: FinishReason) -> None:
        step = context.step
        assert step is not None
        context.step, context.stepped = None, True
        context.sampled.append((step.start, len(context.tokens)))
        report, extra = context.take_report(), told(step)
        has_experts = self._has_experts
        has_report = has_experts or report.selections is not None
        step.future.set_result(
            StepResult(
                token_ids=np.array(step.sampled, np.int32),
                logprobs=np.array(step.logprobs, np.float32),
                finish=reason,
                weight_version=self._runner.weight_version,
                start=step.start,
                experts=report.experts if has_experts else None,
                experts_start=report.start if has_report else 0,
                selections=report.selections,
                warm_reads=report.warm_reads,
                retrieved=report.retrieved,
                codes=report.codes,
                codes_start=report.codes_start,
                top_ids=extra.top_ids,
                top_logprobs=extra.top_logprobs,
                masks=extra.masks,
                stop_text=step.stop_text,
                debug=None if step.debug is None else step.debug.report(),
            )
        )

    def _fork(self, parent: Context, fork: WaitingFork) -> None:
        try:
            self.contexts.fork(parent, fork.child, fork.policy)
        except (EngineError, ValueError) as error:
            fork.future.set_exception(error)
        else:
            fork.future.set_result(None)

    def _fail(self, context: Context, error: EngineError) -> None:
        """End the context's calls; it is left as it was before its step."""
        step, context.step = context.step, None
        if step is not None:
            context.rewind(step.start)
            self.contexts.drop_tail(context)
            step.future.set_exception(error)
        for fork in context.forks:
            fork.future.set_exception(error)
        context.forks.clear()

    def _give_up(self, context: Context) -> None:
        self._fail(
            context,
            EngineError(
                f"context {context.id}: weight version {self._runner.weight_version} computed NaN "
                "or infinity; publish an earlier version"
            ),
        )
        self.contexts.drop_poisoned(context)


def _tell_time(plan: Plan, clock: PartClock) -> None:
    seconds = time.perf_counter() - clock.began
    batch_rows = sum(len(rows) for _, rows in plan)
    for context, rows in plan:
        if context.step is not None and context.step.debug is not None:
            context.step.debug.add(clock, seconds, len(rows), batch_rows)
