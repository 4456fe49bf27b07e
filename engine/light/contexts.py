"""ContextTable: which contexts exist, and what of them is computed.

Where their KV lies, and who gives room when it is short, is up to its two kinds: paged_contexts.py
and tiered_contexts.py. Single-threaded; computes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

from engine.config import EngineConfig
from engine.errors import (
    CapacityError,
    ContextLost,
    ContextTooLong,
    EngineError,
    InvalidStateError,
    NotSupportedError,
)
from engine.kvcache.layout import HeldBytes
from engine.light.alarms import CacheState
from engine.light.context import Context
from engine.light.debug import PartClock
from engine.light.draws import check_key
from engine.light.rows import CacheRows, Plan
from engine.model.config import ModelConfig
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    EvictResult,
    EvictSelector,
    KVSummary,
    RewarmPolicy,
    RewarmResult,
)


class ContextTable(ABC):
    kv: Literal["full", "tiered"]
    """What a context's policy may ask for."""
    has_summaries = False
    """Whether it may ask for summaries of cold blocks."""

    def __init__(self, model_config: ModelConfig, config: EngineConfig) -> None:
        self._model_config = model_config
        self._config = config
        self._contexts: dict[ContextId, Context] = {}
        self._slots = list(range(config.max_contexts - 1, -1, -1))

    def __iter__(self) -> Iterator[Context]:
        return iter(list(self._contexts.values()))

    def __len__(self) -> int:
        return len(self._contexts)

    def get(self, ctx: ContextId) -> Context | None:
        return self._contexts.get(ctx)

    def idle(self, ctx: ContextId, action: str) -> Context:
        """ContextLost when unknown, InvalidStateError when a step or fork still runs."""
        context = self._contexts.get(ctx)
        if context is None:
            raise ContextLost(
                f"{action}: context {ctx} is unknown (released, or the engine restarted); rebuild "
                "it with init_context"
            )
        if not context.is_idle:
            doing = "a step" if context.step is not None else "a fork"
            raise InvalidStateError(
                f"{action}: context {ctx} is running {doing}; await it or cancel it first"
            )
        if action == "get_kv_summary" and context.stepped:
            raise InvalidStateError(
                f"get_kv_summary: context {ctx} has stepped, which moves its KV; ask after "
                "init_context, fork or evict_kv (an empty selector takes nothing)"
            )
        return context

    def open(self, ctx: ContextId, tokens: list[int], policy: ContextPolicy) -> Context:
        self._check_policy(policy)
        if not tokens:
            raise InvalidStateError("init_context got no tokens, expected at least one")
        self._check_tokens(tokens, len(tokens))
        if not self._slots:
            raise CapacityError(
                f"{self._config.max_contexts} contexts are open, the most allowed; release some or "
                "raise engine.max_contexts"
            )
        layers, top_k = self._model_config.num_moe_layers, self._model_config.num_experts_per_tok
        experts = np.zeros((len(tokens), layers, top_k), np.int16)
        todo = list(range(len(tokens)))
        context = Context(ctx, policy, self._slots.pop(), tokens, todo, experts)
        self._contexts[ctx] = context
        self._opened(context)
        return context

    def append(self, ctx: ContextId, tokens: list[int]) -> None:
        context = self.idle(ctx, "append")
        self._check_tokens(tokens, len(context.tokens) + len(tokens))
        start = len(context.tokens)
        context.tokens += tokens
        context.todo += range(start, len(context.tokens))

    def close(self, context: Context) -> None:
        del self._contexts[context.id]
        self._closed(context)
        self._slots.append(context.slot)

    def evict(self, ctx: ContextId, selector: EvictSelector) -> EvictResult:
        """Whole blocks that hold any token of [start, end), and more where ``_evict`` says so."""
        context = self.idle(ctx, "evict_kv")
        self._check_range("evict_kv", context, selector)
        if selector.to == "cold" and self.kv == "full":
            raise NotSupportedError(
                "evict_kv to 'cold': this engine runs full attention and has no cold KV; set "
                "model.attention.mode = 'hybrid'"
            )
        context.stepped = False
        return self._evict(context, selector)

    def rewarm(
        self, ctx: ContextId, selector: EvictSelector, policy: RewarmPolicy, timeout_s: float
    ) -> RewarmResult:
        """Bring cold blocks back; NotSupportedError where there are none."""
        raise NotSupportedError(
            "rewarm_kv: this engine runs full attention and has no cold KV; set "
            "model.attention.mode = 'hybrid'"
        )

    @abstractmethod
    def check_debug(self) -> None:
        """NotSupportedError where rows cannot be watched."""

    def before_batch(self, contexts: Iterable[Context]) -> list[tuple[Context, EngineError]]:
        """What is due between two batches; ``contexts`` whose step cannot go on, and why."""
        return []

    # -- for alarms, see engine.light.relief ----------------------------------------------------

    def cache_state(self) -> CacheState:
        held, total = self.held_bytes(), self.total_bytes
        return CacheState(
            held.hot, held.warm, held.cold, held.warm_bf16, self.expected_saving, total, total
        )

    @property
    def expected_saving(self) -> float:
        """Of bf16, by a full block of the warm tier; 0 where there is none."""
        return 0.0

    def shrink_hot(self) -> int:
        """Shorten the hot zones; how many were longer. Nothing where tiers are the learner's."""
        return 0

    def demote(self, num_bytes: int) -> int:
        """Bytes freed on the device. Here: idle contexts lose their KV, the longest unused first;
        their next step computes it again."""
        before = self.used_bytes
        idle = [c for c in self._contexts.values() if c.is_idle]
        for context in sorted(idle, key=lambda c: c.served):
            if before - self.used_bytes >= num_bytes:
                break
            self._drop_all(context)
        return before - self.used_bytes

    def prewarm_summaries(self, limit: int) -> int:
        """Encode up to ``limit`` cold blocks before a turn asks for them; how many."""
        return 0

    @abstractmethod
    def skip_summaries(self, skip: bool) -> None:
        """Read without summaries of blocks until told otherwise. Nothing in deterministic mode."""

    @abstractmethod
    def warm_up(self, rounds: int) -> int:
        """Take, write and give back all free full-precision blocks ``rounds`` times, so that the
        system has given their memory before somebody waits for it; blocks of one round."""

    @abstractmethod
    def _drop_all(self, context: Context) -> None: ...

    # -- what the kinds do ----------------------------------------------------------------------

    @property
    @abstractmethod
    def used_bytes(self) -> int: ...

    @property
    @abstractmethod
    def total_bytes(self) -> int: ...

    def held_bytes(self) -> HeldBytes:
        """``used_bytes`` by tier; one tier here."""
        return HeldBytes(self.used_bytes)

    @abstractmethod
    def fork(self, parent: Context, child: ContextId, policy: ContextPolicy | None) -> None:
        """Share what both read."""

    @abstractmethod
    def summary(self, ctx: ContextId) -> KVSummary:
        """``kv_bytes`` counts a shared block once for each context that holds it."""

    @abstractmethod
    def forget_computed(self) -> None:
        """All KV is stale: compute every position again."""

    @abstractmethod
    def drop_poisoned(self, context: Context) -> None:
        """Drop KV that may hold NaN, so that nobody ever reads it."""

    @abstractmethod
    def drop_tail(self, context: Context) -> None:
        """Give back what lies past the last token: a step that failed leaves it behind."""

    @abstractmethod
    def begin_batch(self) -> None:
        """A plan begins: nothing is promised yet."""

    @abstractmethod
    def cover(self, context: Context, positions: list[int]) -> None:
        """Room for each position beside what the plan has promised, taken from idle contexts if
        there is none. CapacityError."""

    @abstractmethod
    def make_room(self, context: Context, positions: list[int], victims: Iterable[Context]) -> None:
        """Drop the KV of ``victims`` in order until ``positions`` have room."""

    @abstractmethod
    def rows(self, plan: Plan, clock: PartClock | None = None) -> CacheRows:
        """The plan's rows, one context after the other; all of them are covered. ``clock``: watch
        them, see ``check_debug``."""

    @abstractmethod
    def end(self) -> None:
        """The engine ends."""

    @abstractmethod
    def _opened(self, context: Context) -> None: ...

    @abstractmethod
    def _closed(self, context: Context) -> None: ...

    @abstractmethod
    def _evict(self, context: Context, selector: EvictSelector) -> EvictResult: ...

    # -- checks ---------------------------------------------------------------------------------

    def _check_range(self, action: str, context: Context, selector: EvictSelector) -> None:
        length = len(context.tokens)
        if not 0 <= selector.start <= selector.end <= length:
            raise InvalidStateError(
                f"{action} [{selector.start}, {selector.end}) of a context of {length} tokens; "
                "expected 0 <= start <= end <= length"
            )

    def _check_policy(self, policy: ContextPolicy) -> None:
        if policy.kv not in ("auto", self.kv) or (policy.summaries and not self.has_summaries):
            raise NotSupportedError(
                f"policy kv={policy.kv!r}, summaries={policy.summaries}: this engine serves "
                f"kv={self.kv!r} without summaries, as its model section says "
                f"(attention.mode={self._model_config.attention.mode!r}); see info().capabilities"
            )
        if policy.deterministic and not self._config.deterministic:
            raise NotSupportedError(
                "policy.deterministic=True, but engine.deterministic is False; set it to True"
            )
        if policy.draw is not None:
            check_key(policy.draw)

    def _check_tokens(self, tokens: list[int], length: int) -> None:
        if length > self._config.max_context:
            raise ContextTooLong(
                f"{length} tokens exceed engine.max_context={self._config.max_context}; shorten "
                "the context or raise the limit"
            )
        bad = [t for t in tokens if not 0 <= t < self._model_config.vocab_size]
        if bad:
            raise InvalidStateError(
                f"token id {bad[0]} is outside the vocabulary of {self._model_config.vocab_size}; "
                "tokenizer and model disagree"
            )
