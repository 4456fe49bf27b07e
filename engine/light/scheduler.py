"""What the engine thread does: contexts, block tables, batches, sampling. Single-threaded."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from engine.config import EngineConfig
from engine.errors import CapacityError, ContextLost, EngineError, InvalidStateError, WeightsError
from engine.kvcache.blocks import BlockPool
from engine.light.context import Context, RunningStep
from engine.light.draws import check_key, uniforms
from engine.light.runner import ModelRunner, RowBatch
from engine.light.sampler import sample
from engine.model.config import ModelConfig
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    DrawKey,
    EvictResult,
    EvictSelector,
    FinishReason,
    KVSummary,
    StepRequest,
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

    def __init__(self, model_config: ModelConfig, config: EngineConfig) -> None:
        if config.max_context > model_config.max_position_embeddings:
            raise CapacityError(
                f"engine.max_context={config.max_context} exceeds the model's "
                f"max_position_embeddings={model_config.max_position_embeddings}; lower it"
            )
        self._config = config
        self._model_config = model_config
        self._runner = ModelRunner(model_config, config)
        self._pool = BlockPool(config.num_blocks)
        self._contexts: dict[ContextId, Context] = {}
        self._slots = list(range(config.max_contexts - 1, -1, -1))
        blocks_per_context = -(-config.max_context // config.block_size)
        self._tables = np.zeros((config.max_contexts, blocks_per_context), np.int64)
        self._unseeded = 0

    # -- context commands -----------------------------------------------------------------------

    def open(self, ctx: ContextId, tokens: list[int], policy: ContextPolicy) -> None:
        if not tokens:
            raise InvalidStateError("init_context got no tokens, expected at least one")
        self._check_tokens(tokens, len(tokens))
        if policy.draw is not None:
            check_key(policy.draw)
        if not self._slots:
            raise CapacityError(
                f"{self._config.max_contexts} contexts are open, the most allowed; release some or "
                "raise engine.max_contexts"
            )
        experts = np.zeros(
            (
                self._config.max_context,
                self._model_config.num_moe_layers,
                self._model_config.num_experts_per_tok,
            ),
            np.int16,
        )
        self._contexts[ctx] = Context(
            ctx, policy, self._slots.pop(), tokens, list(range(len(tokens))), experts
        )

    def append(self, ctx: ContextId, tokens: list[int]) -> None:
        context = self._idle(ctx, "append")
        self._check_tokens(tokens, len(context.tokens) + len(tokens))
        start = len(context.tokens)
        context.tokens += tokens
        context.todo += range(start, len(context.tokens))

    def begin_step(self, request: StepRequest) -> Future[StepResult]:
        """The future resolves when the step ends."""
        context = self._idle(request.ctx, "forward_step")
        if self._runner.weight_version < 0:
            raise WeightsError("this engine has no weights yet; call load_weights before a step")
        if request.max_new_tokens < 1:
            raise InvalidStateError(f"max_new_tokens={request.max_new_tokens}, expected at least 1")
        if len(context.tokens) >= self._config.max_context:
            raise CapacityError(
                f"context holds {len(context.tokens)} tokens, engine.max_context is "
                f"{self._config.max_context}: no room for a new one"
            )
        if not context.todo:
            # its KV is there, its logits are not: compute the last row once more
            context.todo = [len(context.tokens) - 1]
        future: Future[StepResult] = Future()
        context.step = RunningStep(request, future, start=len(context.tokens))
        return future

    def cancel(self, ctx: ContextId) -> None:
        context = self._contexts.get(ctx)
        if context is not None and context.step is not None:
            context.step.cancelled = True

    def release(self, ctx: ContextId) -> None:
        context = self._contexts.pop(ctx, None)
        if context is None:
            return
        if context.step is not None:
            self._finish(context, "cancelled")
        self._drop_blocks(context, sorted(context.blocks))
        self._slots.append(context.slot)
        for waiting in context.forks:
            waiting.set_exception(ContextLost(f"context {ctx} was released while a fork waited"))

    def prepare_fork(self, ctx: ContextId) -> Future[None]:
        """Resolves when all but the last token of the parent are computed."""
        context = self._idle(ctx, "fork")
        future: Future[None] = Future()
        if context.num_prefill and self._runner.weight_version >= 0:
            context.forks.append(future)
        else:
            future.set_result(None)
        return future

    def fork(self, ctx: ContextId, child: ContextId, policy: ContextPolicy | None) -> None:
        """Share full blocks; copy the one that both would write to."""
        parent = self._idle(ctx, "fork")
        self.open(child, list(parent.tokens), policy or parent.policy)
        context = self._contexts[child]
        size = self._config.block_size
        missing = {position // size for position in parent.todo}
        shared_end = (len(parent.tokens) - 1) // size
        for logical, physical in sorted(parent.blocks.items()):
            if logical in missing and logical != shared_end:
                continue
            if logical < shared_end:
                self._pool.share([physical])
                context.blocks[logical] = physical
            else:
                try:
                    (copy,) = self._pool.allocate(1)
                except CapacityError:
                    self.release(child)
                    raise
                self._runner.kv.copy_block(physical, copy)
                context.blocks[logical] = copy
            self._tables[context.slot, logical] = context.blocks[logical]
        absent = set(parent.todo)
        context.todo = [
            p for p in range(len(context.tokens)) if p in absent or p // size not in context.blocks
        ]
        context.experts[: len(parent.tokens)] = parent.experts[: len(parent.tokens)]

    def summary(self, ctx: ContextId) -> KVSummary:
        context = self._idle(ctx, "get_kv_summary")
        held = len(context.tokens) - len(context.todo)
        return KVSummary(
            num_tokens=len(context.tokens),
            num_hot=held,
            num_warm=0,
            num_cold=0,
            kv_bytes=len(context.blocks) * self._runner.kv.bytes_per_block,
        )

    def evict(self, ctx: ContextId, selector: EvictSelector) -> EvictResult:
        """Whole blocks that hold any token of [start, end), rounded outward."""
        context = self._idle(ctx, "evict_kv")
        if not 0 <= selector.start <= selector.end <= len(context.tokens):
            raise InvalidStateError(
                f"evict_kv [{selector.start}, {selector.end}) of a context of "
                f"{len(context.tokens)} tokens; expected 0 <= start <= end <= length"
            )
        size = self._config.block_size
        wanted = range(selector.start // size, -(-selector.end // size))
        gone = [b for b in wanted if b in context.blocks and selector.end > selector.start]
        freed = self._drop_blocks(context, gone)
        length = len(context.tokens)
        lost = {p for b in gone for p in range(b * size, min((b + 1) * size, length))}
        context.todo = sorted(lost | set(context.todo))
        return EvictResult(
            evicted=tuple((b * size, min((b + 1) * size, length)) for b in gone),
            freed_bytes=freed * self._runner.kv.bytes_per_block,
        )

    def load_weights(self, weights: WeightSet) -> int:
        """Swap between steps; what was computed with the old weights is computed again."""
        self._runner.load(weights)
        for context in self._contexts.values():
            context.todo = list(range(len(context.tokens)))
        return self._runner.weight_version

    def usage(self) -> Usage:
        used = self._pool.num_blocks - self._pool.num_free
        return Usage(
            self._runner.weight_version,
            self._runner.weight_checksum,
            len(self._contexts),
            used * self._runner.kv.bytes_per_block,
            self._pool.num_blocks * self._runner.kv.bytes_per_block,
        )

    def abandon(self, error: EngineError) -> None:
        """End every open call with ``error``."""
        for context in self._contexts.values():
            if context.step is not None:
                context.step.future.set_exception(error)
                context.step = None
            for waiting in context.forks:
                waiting.set_exception(error)
            context.forks.clear()

    # -- the batch ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return any(context.wants_rows for context in self._contexts.values())

    def step(self) -> None:
        """Compute one batch of rows and hand out what it finished."""
        for context in list(self._contexts.values()):
            if context.step is not None and context.step.cancelled:
                self._finish(context, "cancelled")
        plan = self._plan()
        if not plan:
            return
        slots: list[int] = []
        positions: list[int] = []
        ids: list[int] = []
        sampled_rows: list[int] = []
        sampling: list[Context] = []
        for context, rows in plan:
            slots += [context.slot] * len(rows)
            positions += rows
            ids += [context.tokens[p] for p in rows]
            if context.step is not None and len(rows) == len(context.todo):
                sampled_rows.append(len(positions) - 1)
                sampling.append(context)
        width = max(positions) // self._config.block_size + 1
        batch = RowBatch(
            np.array(ids, np.int64),
            np.array(positions, np.int64),
            self._tables[np.array(slots), :width],
            np.array(sampled_rows, np.int64),
        )
        logits, experts = self._runner.run(batch)
        start = 0
        for context, rows in plan:
            context.experts[rows] = experts[start : start + len(rows)]
            start += len(rows)
            del context.todo[: len(rows)]
            if context.forks and not context.num_prefill:
                for waiting in context.forks:
                    waiting.set_result(None)
                context.forks.clear()
        if sampling:
            self._sample(sampling, logits)

    def _plan(self) -> list[tuple[Context, list[int]]]:
        """Decode rows first, then prefill chunks, while ``max_rows`` lasts."""
        running = [context for context in self._contexts.values() if context.wants_rows]
        running.sort(key=lambda c: (len(c.todo) > 1, -c.policy.priority))
        room = self._config.max_rows
        plan: list[tuple[Context, list[int]]] = []
        for context in running:
            rows = context.next_rows(room)
            if not rows:
                continue
            try:
                self._cover(context, rows)
            except CapacityError as error:
                self._fail(context, error)
                continue
            plan.append((context, rows))
            room -= len(rows)
            if not room:
                break
        return plan

    def _cover(self, context: Context, rows: list[int]) -> None:
        """Make sure each position has a physical block."""
        size = self._config.block_size
        missing = [b for b in dict.fromkeys(p // size for p in rows) if b not in context.blocks]
        if not missing:
            return
        for logical, physical in zip(missing, self._pool.allocate(len(missing)), strict=True):
            context.blocks[logical] = physical
            self._tables[context.slot, logical] = physical

    def _sample(self, contexts: list[Context], logits: np.ndarray) -> None:
        steps = [context.step for context in contexts]
        draws, positions = [], []
        for context in contexts:
            draws.append(context.policy.draw or self._fresh_draw())
            positions.append(len(context.tokens))
        params = [step.request.sampling for step in steps if step is not None]
        ids, logprobs = sample(logits, uniforms(draws, positions), params)
        for context, step, token, logprob in zip(
            contexts, steps, ids.tolist(), logprobs.tolist(), strict=True
        ):
            assert step is not None
            context.todo.append(len(context.tokens))
            context.tokens.append(token)
            step.sampled.append(token)
            step.logprobs.append(logprob)
            if token in step.request.stop_ids:
                self._finish(context, "stop")
            elif (
                len(step.sampled) >= step.request.max_new_tokens
                or len(context.tokens) >= self._config.max_context
            ):
                self._finish(context, "length")

    def _fresh_draw(self) -> DrawKey:
        """Sampling without a draw key: still a stream of its own per token."""
        self._unseeded += 1
        return DrawKey(run_seed=0, task=self._unseeded & 0xFFFFFFFF, stream=0xFFFF)

    def _finish(self, context: Context, reason: FinishReason) -> None:
        step = context.step
        assert step is not None
        context.step = None
        experts, start = None, 0
        if self._model_config.num_moe_layers:
            done = len(context.tokens) - len(context.todo)
            experts, start = context.take_experts(done)
        step.future.set_result(
            StepResult(
                token_ids=np.array(step.sampled, np.int32),
                logprobs=np.array(step.logprobs, np.float32),
                finish=reason,
                weight_version=self._runner.weight_version,
                start=step.start,
                experts=experts,
                experts_start=start,
            )
        )

    def _fail(self, context: Context, error: EngineError) -> None:
        if context.step is not None:
            context.step.future.set_exception(error)
            context.step = None
        for waiting in context.forks:
            waiting.set_exception(error)
        context.forks.clear()

    def _drop_blocks(self, context: Context, logical: list[int]) -> int:
        freed = self._pool.free([context.blocks.pop(b) for b in logical])
        self._tables[context.slot, logical] = 0
        return freed

    def _idle(self, ctx: ContextId, action: str) -> Context:
        context = self._contexts.get(ctx)
        if context is None:
            raise ContextLost(
                f"{action}: context {ctx} is unknown (released, or the engine restarted)"
            )
        if context.step is not None:
            raise InvalidStateError(
                f"{action}: context {ctx} is running a step; await it or cancel it first"
            )
        return context

    def _check_tokens(self, tokens: list[int], length: int) -> None:
        if length > self._config.max_context:
            raise CapacityError(
                f"{length} tokens exceed engine.max_context={self._config.max_context}; shorten "
                "the context or raise the limit"
            )
        bad = [t for t in tokens if not 0 <= t < self._model_config.vocab_size]
        if bad:
            raise InvalidStateError(
                f"token id {bad[0]} is outside the vocabulary of {self._model_config.vocab_size}; "
                "tokenizer and model disagree"
            )
