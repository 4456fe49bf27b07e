"""MRI: the one door between PARL and whatever runs the policy.

Every call that may cross a process is a coroutine: thousands of episodes share one event loop, so
none may block it. Calls for one context must not overlap (InvalidStateError); calls for different
contexts may, from any thread or loop, and concurrent ``forward_step`` calls share one batch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, runtime_checkable

from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    EngineInfo,
    EvictResult,
    EvictSelector,
    KVSummary,
    RewarmPolicy,
    RewarmResult,
    StepDelta,
    StepRequest,
    StepResult,
    WeightSet,
)

MRI_VERSION = "1.1"


@runtime_checkable
class ModelRuntime(Protocol):
    """An engine. Errors: engine.errors (InvalidStateError, ContextLost, CapacityError, ...)."""

    async def init_context(
        self, token_ids: Sequence[int], policy: ContextPolicy, media: Sequence[Any] = ()
    ) -> ContextId:
        """Create a context holding ``token_ids`` (non-empty). Prefill may be lazy."""
        ...

    async def append(
        self, ctx: ContextId, token_ids: Sequence[int], media: Sequence[Any] = ()
    ) -> None:
        """Add tokens the policy did not sample (observations, headers). A remote engine may send
        them, and report their errors, with the next call for ``ctx``."""
        ...

    async def forward_step(self, request: StepRequest) -> StepResult:
        """Sample tokens; they become part of the context. A step that raises adds none."""
        ...

    async def cancel(self, ctx: ContextId) -> None:
        """End a running step with finish="cancelled"; no-op when idle."""
        ...

    async def get_kv_summary(self, ctx: ContextId) -> KVSummary:
        """Account of what is kept. Only after init_context, fork or evict_kv (an empty selector
        will do), until the next step: a step moves KV, then this is an InvalidStateError."""
        ...

    async def evict_kv(self, ctx: ContextId, selector: EvictSelector) -> EvictResult:
        """Drop whole blocks, or more; a later step computes them again, to the same bits."""
        ...

    async def fork(self, ctx: ContextId, policy: ContextPolicy | None = None) -> ContextId:
        """A new context with the same tokens; full KV blocks are shared. ``policy`` may replace
        the parent's (a group's samples differ in ``draw``)."""
        ...

    async def release(self, ctx: ContextId) -> None:
        """Free the context. Releasing an unknown context is a no-op (it may have died)."""
        ...

    async def load_weights(self, weights: WeightSet) -> int:
        """Verify and swap atomically at a step boundary; returns the active version.

        WeightsError leaves the old weights active. Running steps end under the old weights first,
        later ones wait for the swap: a StepResult has one weight version. KV of live contexts is
        recomputed by their next step with the new weights.
        """
        ...

    async def info(self) -> EngineInfo: ...


@runtime_checkable
class Rewarming(Protocol):
    """What an engine with the capability "rewarm" does besides."""

    async def rewarm_kv(
        self,
        ctx: ContextId,
        selector: EvictSelector,
        policy: RewarmPolicy = "wait_complete",
        timeout_s: float = 30.0,
    ) -> RewarmResult:
        """Bring cold blocks that hold any token of ``selector`` back, to the bit, so that later
        steps read them. wait_complete: all of them or BlockCorrupt; timeout: what arrives within
        ``timeout_s``, the rest before later steps; best_effort: all before later steps."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """What an engine with the capability "stream" does besides."""

    def stream_step(self, request: StepRequest) -> AsyncIterator[StepDelta | StepResult]:
        """``forward_step`` as it goes: deltas, then the StepResult, whose tokens are those of the
        deltas. Closing the iterator before its end cancels the step."""
        ...
