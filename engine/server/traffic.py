"""Several engines behind one door: a weighted split of new contexts, and a canary that is rolled
back by itself when it fails or is slow.

An arm is any ModelRuntime: another engine on the same weights (A/B), or the same engine with a new
weight version (canary release). A context stays on its arm for life, since its KV lives there.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from engine.errors import (
    CapacityError,
    ConstraintError,
    ContextLost,
    InvalidStateError,
    NotSupportedError,
    TryAgainLater,
)
from engine.runtime.protocol import ModelRuntime, Streaming
from engine.runtime.types import (
    ContextId,
    ContextPolicy,
    EngineInfo,
    EvictResult,
    EvictSelector,
    KVSummary,
    StepDelta,
    StepRequest,
    StepResult,
    WeightSet,
)
from engine.server.rollback import Arm, RollbackConfig

log = structlog.get_logger(__name__)

CALLERS_FAULT = (
    CapacityError,
    ConstraintError,
    InvalidStateError,
    NotSupportedError,
    TryAgainLater,
    asyncio.CancelledError,
    GeneratorExit,
)
"""Say nothing about the health of an arm."""


@dataclass(frozen=True, slots=True)
class ArmState:
    """For metrics; ``reason`` is why it was rolled back, empty while it serves."""

    name: str
    weight: float
    steps: int
    errors: int
    token_s: float
    weight_version: int
    reason: str


@dataclass(slots=True)
class TrafficSplit:
    """MRI and Streaming over several arms. The first is the baseline: it is never rolled back."""

    arms: Mapping[str, ModelRuntime]
    weights: Mapping[str, float]
    config: RollbackConfig
    on_rollback: Callable[[str, str], None] = lambda name, reason: None
    clock: Callable[[], float] = time.perf_counter
    _arms: dict[str, Arm] = field(init=False, repr=False)
    _lock: threading.Lock = field(init=False, repr=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if not self.arms or set(self.arms) != set(self.weights):
            raise ValueError(
                f"weights are for {sorted(self.weights)}, arms are {sorted(self.arms)}; expected "
                "one weight for each arm"
            )
        bad = [f"{k}={w}" for k, w in self.weights.items() if not 0 <= w < math.inf or "/" in k]
        if bad or not any(self.weights.values()):
            raise ValueError(
                f"traffic weights {bad or dict(self.weights)}: expected numbers >= 0, not all 0, "
                "and names without '/'"
            )
        self._arms = {
            name: Arm.new(name, runtime, self.weights[name], self.config.window)
            for name, runtime in self.arms.items()
        }

    @property
    def baseline(self) -> str:
        return next(iter(self._arms))

    def state(self) -> list[ArmState]:
        with self._lock:
            return [
                ArmState(
                    arm.name,
                    arm.weight,
                    len(arm.failed),
                    sum(arm.failed),
                    statistics.median(arm.token_s) if arm.token_s else math.nan,
                    arm.version,
                    arm.reason,
                )
                for arm in self._arms.values()
            ]

    def set_weight(self, name: str, weight: float) -> None:
        """New contexts from now on; also how a rolled back arm comes back, with a clean record."""
        with self._lock:
            arm = self._arms[name]
            arm.weight, arm.reason = weight, ""
            arm.forget()

    # -- contexts -------------------------------------------------------------------------------

    async def init_context(
        self, token_ids: Sequence[int], policy: ContextPolicy, media: Sequence[Any] = ()
    ) -> ContextId:
        arm = self._next_arm()
        try:
            ctx = await arm.runtime.init_context(token_ids, policy, media)
        except BaseException as error:
            self._failed(arm, error)
            raise
        return ContextId(f"{arm.name}/{ctx}")

    async def append(
        self, ctx: ContextId, token_ids: Sequence[int], media: Sequence[Any] = ()
    ) -> None:
        arm, inner = self._locate(ctx)
        await arm.runtime.append(inner, token_ids, media)

    async def fork(self, ctx: ContextId, policy: ContextPolicy | None = None) -> ContextId:
        arm, inner = self._locate(ctx)
        return ContextId(f"{arm.name}/{await arm.runtime.fork(inner, policy)}")

    async def release(self, ctx: ContextId) -> None:
        arm, inner = self._locate(ctx)
        await arm.runtime.release(inner)

    async def cancel(self, ctx: ContextId) -> None:
        arm, inner = self._locate(ctx)
        await arm.runtime.cancel(inner)

    async def get_kv_summary(self, ctx: ContextId) -> KVSummary:
        arm, inner = self._locate(ctx)
        return await arm.runtime.get_kv_summary(inner)

    async def evict_kv(self, ctx: ContextId, selector: EvictSelector) -> EvictResult:
        arm, inner = self._locate(ctx)
        return await arm.runtime.evict_kv(inner, selector)

    async def load_weights(self, weights: WeightSet) -> int:
        """NotSupportedError: say which arm, with ``load_weights_on``."""
        raise NotSupportedError(
            f"weights go to one of {', '.join(self._arms)}; use load_weights_on(arm, weights)"
        )

    async def load_weights_on(self, name: str, weights: WeightSet) -> int:
        """A new version on one arm; its record starts again."""
        version = await self._arms[name].runtime.load_weights(weights)
        with self._lock:
            arm = self._arms[name]
            arm.forget()
            arm.version = version
        return version

    async def info(self) -> EngineInfo:
        """Of the baseline; contexts and bytes of all, capabilities that all have."""
        infos = [await arm.runtime.info() for arm in self._arms.values()]
        return replace(
            infos[0],
            engine="+".join(info.engine for info in infos),
            max_context=min(info.max_context for info in infos),
            capabilities=frozenset.intersection(*(info.capabilities for info in infos)),
            num_contexts=sum(info.num_contexts for info in infos),
            kv_bytes_used=sum(info.kv_bytes_used for info in infos),
            kv_bytes_total=sum(info.kv_bytes_total for info in infos),
        )

    # -- steps ----------------------------------------------------------------------------------

    async def forward_step(self, request: StepRequest) -> StepResult:
        arm, inner = self._locate(request.ctx)
        began = self.clock()
        try:
            result = await arm.runtime.forward_step(replace(request, ctx=inner))
        except BaseException as error:
            self._failed(arm, error)
            raise
        self._served(arm, result, self.clock() - began)
        return result

    async def stream_step(self, request: StepRequest) -> AsyncIterator[StepDelta | StepResult]:
        arm, inner = self._locate(request.ctx)
        if not isinstance(arm.runtime, Streaming):
            raise NotSupportedError(f"arm {arm.name} cannot stream; ask for the whole answer")
        began = self.clock()
        stream = arm.runtime.stream_step(replace(request, ctx=inner))
        try:
            async for part in stream:
                if isinstance(part, StepResult):
                    self._served(arm, part, self.clock() - began)
                yield part
        except BaseException as error:
            self._failed(arm, error)
            raise
        finally:
            closing = getattr(stream, "aclose", None)
            if closing is not None:
                await closing()

    # -- who serves, and how well ---------------------------------------------------------------

    def _next_arm(self) -> Arm:
        """Smooth weighted round robin: shares are exact over any few contexts, no draw needed."""
        with self._lock:
            serving = [arm for arm in self._arms.values() if arm.weight > 0]
            total = sum(arm.weight for arm in serving)
            for arm in serving:
                arm.credit += arm.weight
            chosen = max(serving, key=lambda arm: arm.credit)
            chosen.credit -= total
            return chosen

    def _locate(self, ctx: ContextId) -> tuple[Arm, ContextId]:
        name, slash, inner = ctx.partition("/")
        if not slash or name not in self._arms:
            raise ContextLost(f"context {ctx} is of none of the arms {', '.join(self._arms)}")
        return self._arms[name], ContextId(inner)

    def _served(self, arm: Arm, result: StepResult, seconds: float) -> None:
        with self._lock:
            arm.served(result, seconds)
        self._judge(arm)

    def _failed(self, arm: Arm, error: BaseException) -> None:
        if isinstance(error, CALLERS_FAULT):
            return
        with self._lock:
            arm.failed.append(True)
        self._judge(arm)

    def _judge(self, arm: Arm) -> None:
        with self._lock:
            base = self._arms[self.baseline]
            if arm is base or arm.weight == 0 or len(arm.failed) < self.config.min_steps:
                return
            arm.reason = arm.worse_than(base, self.config)
            if not arm.reason:
                return
            arm.weight = 0.0
            if base.weight == 0:
                base.weight = 1.0  # it was meant to take over: somebody has to serve
        log.warning("traffic_rolled_back", arm=arm.name, reason=arm.reason)
        self.on_rollback(arm.name, arm.reason)
