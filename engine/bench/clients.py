"""Clients of a router in one event loop: what the benches of serving have in common."""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.errors import EngineError, TryAgainLater
from engine.kvcache.layout import CacheLayout
from engine.light.engine import LightEngine
from engine.light.routed import RoutedRuntime
from engine.light.tables import tier_config
from engine.light.waiting_room import RouterConfig
from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.runtime.types import (
    ContextPolicy,
    Sampling,
    StepDelta,
    StepRequest,
    StepResult,
    WeightSet,
)
from engine.runtime.weights import make_weight_set

TINY = ModelConfig(max_position_embeddings=2048)
"""The demo's shape: 0.55 M parameters."""
ENGINE = EngineConfig(
    max_context=512, num_blocks=2048, max_contexts=1024, max_rows=256, deterministic=False
)
GREEDY = Sampling(temperature=0.0)


def make_weights(model: ModelConfig, version: int, seed: int = 0) -> WeightSet:
    """Random ones."""
    tensors = {name: t.numpy() for name, t in PolicyModel(model, seed).state_dict().items()}
    return make_weight_set(version, tensors, model.model_dump(mode="json"))


@asynccontextmanager
async def routed_engine(
    router: RouterConfig, engine: EngineConfig = ENGINE, model: ModelConfig = TINY
) -> AsyncIterator[tuple[RoutedRuntime, LightEngine]]:
    """A real engine with random weights, warm, behind a router."""
    weights = make_weights(model, 0)
    light = LightEngine(model, engine, fetch_weights=lambda version: weights)
    hybrid = model.attention.mode == "hybrid"
    layout = CacheLayout.of(model, model.attention.profile if hybrid else "full")
    tiers = tier_config(model, engine)
    if not hybrid:
        tiers = tiers.model_copy(update={"profile": "full", "cold": "off"})
    info = await light.info()
    routed = RoutedRuntime(
        light,
        router,
        kv_bytes=lambda n: layout.bytes(n, tiers).device,
        kv_bytes_total=info.kv_bytes_total,
        on_peak=light.skip_summaries,
    )
    try:
        await light.warm_up()
        yield routed, light
    finally:
        light.close()


@dataclass(frozen=True, slots=True)
class Answer:
    """One request; seconds. ``outcome``: ok, shed, or the error's class."""

    outcome: str
    first_s: float = math.nan
    total_s: float = math.nan
    gaps_s: tuple[float, ...] = ()
    """Between its tokens."""
    token_ids: tuple[int, ...] = ()
    weight_version: int = -1
    retry_after_s: float = 0.0


async def ask(
    runtime: RoutedRuntime | LightEngine,
    prompt: Sequence[int],
    num_tokens: int,
    policy: ContextPolicy | None = None,
    sampling: Sampling = GREEDY,
) -> Answer:
    """Open, stream, release. Errors of the engine are outcomes."""
    began = time.perf_counter()
    times: list[float] = []
    ctx = None
    try:
        ctx = await runtime.init_context(prompt, policy or ContextPolicy())
        stream: Any = runtime.stream_step(StepRequest(ctx, num_tokens, sampling))
        async with aclosing(stream):
            async for part in stream:
                if isinstance(part, StepDelta):
                    times.append(time.perf_counter())
                elif isinstance(part, StepResult):
                    return Answer(
                        "ok",
                        times[0] - began,
                        time.perf_counter() - began,
                        tuple(np.diff(times).tolist()),
                        tuple(part.token_ids.tolist()),
                        part.weight_version,
                    )
        raise EngineError("a stream ended without a result; a bug")
    except TryAgainLater as error:
        return Answer("shed", retry_after_s=error.retry_after_s)
    except EngineError as error:
        return Answer(type(error).__name__)
    finally:
        if ctx is not None:
            await runtime.release(ctx)


@dataclass(slots=True)
class Clients:
    """Closed loop: each asks again when it was answered; one that was shed waits ``pause_s``."""

    runtime: RoutedRuntime
    prompt_tokens: int = 48
    num_tokens: int = 24
    pause_s: float = 0.05
    answers: list[Answer] = field(default_factory=list[Answer])
    asked: int = 0

    async def run(self, count: int, seconds: float, seed: int = 0) -> None:
        """Until ``seconds`` have passed; then the last requests end."""
        until = time.perf_counter() + seconds
        await asyncio.gather(*(self._one(seed * 10_000 + number, until) for number in range(count)))

    async def _one(self, number: int, until: float) -> None:
        rng = np.random.default_rng(number)
        while time.perf_counter() < until:
            prompt = rng.integers(0, TINY.vocab_size, self.prompt_tokens).tolist()
            self.asked += 1
            answer = await ask(self.runtime, prompt, self.num_tokens)
            self.answers.append(answer)
            if answer.outcome == "shed":
                await asyncio.sleep(self.pause_s)


@dataclass(frozen=True, slots=True)
class Load:
    """Of ``Clients``; ms."""

    asked: int
    outcomes: dict[str, int]
    tokens_per_s: float
    tokens_per_cpu_s: float
    """Of the whole process: steadier than wall time where others compute too."""
    requests_per_s: float
    first_ms_p50: float
    first_ms_p99: float
    total_ms_p50: float
    total_ms_p99: float

    @classmethod
    def of(cls, clients: Clients, seconds: float, cpu_s: float) -> Load:
        answers = clients.answers
        done = [a for a in answers if a.outcome == "ok"]
        return cls(
            clients.asked,
            dict(Counter(a.outcome for a in answers)),
            round(sum(len(a.token_ids) for a in done) / seconds, 1),
            round(sum(len(a.token_ids) for a in done) / cpu_s, 1),
            round(len(done) / seconds, 1),
            *(ms(quantile([a.first_s for a in done], q)) for q in (0.5, 0.99)),
            *(ms(quantile([a.total_s for a in done], q)) for q in (0.5, 0.99)),
        )

    @property
    def lost(self) -> int:
        """Neither answered nor refused."""
        return self.asked - sum(self.outcomes.values())

    def data(self) -> dict[str, Any]:
        return {**asdict(self), "lost": self.lost}


def quantile(values: Sequence[float], q: float) -> float:
    """Nearest rank; nan of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)]


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def spread(values: Sequence[float]) -> float:
    """Standard deviation; 0 of fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def machine() -> dict[str, Any]:
    """What a figure stands beside."""
    return {"cpus": len(os.sched_getaffinity(0)), "load_1m": round(os.getloadavg()[0], 2)}
