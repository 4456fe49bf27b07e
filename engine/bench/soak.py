"""Does it stay as it was? ``python -m engine.bench.soak --minutes 10``.

Workers of one hybrid engine evict, step, ask for summaries, fork and release at the same time, as
randomly as they like; the process' memory must not grow after the first fifth. Beside them one
client measures times to first token. Then, in fresh processes: the first 20 of those after warm-up
and after a cold start (seed 5.2).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.bench.clients import GREEDY, machine, make_weights, ms, quantile, spread
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.light.engine import LightEngine
from engine.model.config import ModelConfig
from engine.runtime.types import ContextId, ContextPolicy, EvictSelector, Sampling, StepRequest

MODEL = ModelConfig.model_validate(
    {
        "num_hidden_layers": 2,
        "max_position_embeddings": 1024,
        "attention": {
            "mode": "hybrid",
            "hot": 64,
            "hybrid": {"window": 64, "topk": 16, "candidates": 64, "dense_below": 0},
        },
    }
)
CONFIG = EngineConfig.model_validate(
    {
        "max_context": 512,
        "num_blocks": 256,
        "num_warm_blocks": 512,
        "max_contexts": 64,
        "max_rows": 128,
        "deterministic": False,
        "tiers": {"warm": 128, "host_bytes": 16 << 20},
    }
)
STILL_S = 120.0
FIRST = 20
"""Times to first token whose spread is compared."""


@dataclass(slots=True)
class Soak:
    engine: LightEngine
    until: float
    done: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    first_s: list[float] = field(default_factory=list[float])
    memory: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    async def worker(self, number: int) -> None:
        """One context after the other, each treated at random until it is full."""
        rng = np.random.default_rng(number)
        while time.perf_counter() < self.until:
            ctx = await self.engine.init_context(_prompt(rng, 60), ContextPolicy())
            try:
                for _ in range(int(rng.integers(3, 12))):
                    if time.perf_counter() < self.until:
                        await self._act(rng, ctx)
            except EngineError as error:
                # no room, or a context that is full: the next one then
                self.refused[type(error).__name__] += 1
            finally:
                await self.engine.release(ctx)

    async def _act(self, rng: np.random.Generator, ctx: ContextId) -> None:
        name = str(rng.choice(list(_ACTS)))
        await _ACTS[name](self.engine, ctx, rng)
        self.done[name] += 1

    async def finish(self, work: asyncio.Future[Any]) -> None:
        """TimeoutError when nothing at all has ended for two minutes."""
        seen = -1
        while not work.done():
            await asyncio.wait({work}, timeout=STILL_S)
            ended = sum(self.done.values()) + sum(self.refused.values()) + len(self.first_s)
            if not work.done() and ended == seen:
                work.cancel()
                raise TimeoutError(f"nothing has ended for {STILL_S:g} s, after {dict(self.done)}")
            seen = ended
        work.result()

    async def look(self, every_s: float) -> None:
        """Memory and a time to first token."""
        rng = np.random.default_rng(999)
        began = time.perf_counter()
        while time.perf_counter() < self.until:
            self.first_s.append(await first_token_s(self.engine, rng))
            gc.collect()
            self.memory.append((time.perf_counter() - began, rss_bytes()))
            await asyncio.sleep(every_s)


async def _step(engine: LightEngine, ctx: ContextId, rng: np.random.Generator) -> None:
    await engine.forward_step(StepRequest(ctx, int(rng.integers(1, 24)), Sampling()))


async def _observe(engine: LightEngine, ctx: ContextId, rng: np.random.Generator) -> None:
    await engine.append(ctx, _prompt(rng, int(rng.integers(1, 40))))
    await _step(engine, ctx, rng)


async def _evict(engine: LightEngine, ctx: ContextId, rng: np.random.Generator) -> None:
    held = (await engine.evict_kv(ctx, EvictSelector(0, 0))) and await engine.get_kv_summary(ctx)
    start, end = sorted(rng.integers(0, held.num_tokens + 1, 2).tolist())
    to = "cold" if rng.random() < 0.5 else "absent"
    await engine.evict_kv(ctx, EvictSelector(start, end, to))  # type: ignore[arg-type]


async def _rewarm(engine: LightEngine, ctx: ContextId, rng: np.random.Generator) -> None:
    del rng
    await engine.evict_kv(ctx, EvictSelector(0, 0))
    held = await engine.get_kv_summary(ctx)
    await engine.rewarm_kv(ctx, EvictSelector(0, held.num_tokens))


async def _fork(engine: LightEngine, ctx: ContextId, rng: np.random.Generator) -> None:
    child = await engine.fork(ctx)
    try:
        await asyncio.gather(_step(engine, ctx, rng), _step(engine, child, rng))
    finally:
        await engine.release(child)


Act = Callable[[LightEngine, ContextId, np.random.Generator], Coroutine[Any, Any, None]]
_ACTS: dict[str, Act] = {
    "step": _step,
    "observe": _observe,
    "evict": _evict,
    "rewarm": _rewarm,
    "fork": _fork,
}


def _prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, MODEL.vocab_size, length).tolist()


async def first_token_s(engine: LightEngine, rng: np.random.Generator) -> float:
    """Of a prompt of 96 tokens."""
    prompt = _prompt(rng, 96)
    began = time.perf_counter()
    ctx = await engine.init_context(prompt, ContextPolicy(priority=1))
    await engine.forward_step(StepRequest(ctx, 1, GREEDY))
    seconds = time.perf_counter() - began
    await engine.release(ctx)
    return seconds


def rss_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def new_engine() -> LightEngine:
    weights = make_weights(MODEL, 1)
    return LightEngine(MODEL, CONFIG, fetch_weights=lambda version: weights)


async def soak(seconds: float, workers: int = 8, every_s: float = 0.5) -> dict[str, Any]:
    """Memory is flat when the means of its later quarters stay within 2 % of each other, from a
    fifth of the time on."""
    engine = new_engine()
    try:
        await engine.warm_up()
        run = Soak(engine, time.perf_counter() + seconds)
        work = asyncio.gather(run.look(every_s), *(run.worker(n) for n in range(workers)))
        await run.finish(work)
        left = await engine.info()
    finally:
        engine.close()
    later = [rss for at, rss in run.memory if at >= 0.2 * seconds]
    quarters = [float(np.mean(part)) for part in np.array_split(np.array(later), 4) if len(part)]
    change = max(quarters) / min(quarters) - 1 if quarters else float("nan")
    unexpected = set(run.refused) - {"CapacityError", "ContextTooLong"}
    return {
        "ok": change <= 0.02 and left.num_contexts == 0 and not unexpected,
        "seconds": seconds,
        "done": dict(run.done),
        "refused": dict(run.refused),
        "rss_mib_by_quarter": [round(q / 2**20, 1) for q in quarters],
        "rss_change": round(change, 4),
        "first_ms_p50": ms(quantile(run.first_s, 0.5)),
        "first_ms_p99": ms(quantile(run.first_s, 0.99)),
        "contexts_left": left.num_contexts,
        "kv_bytes_left": left.kv_bytes_used,
    }


async def first_tokens(warm: bool) -> list[float]:
    """The first 20 of an engine, in seconds."""
    engine = new_engine()
    rng = np.random.default_rng(5)
    try:
        if warm:
            await engine.warm_up()
            for _ in range(3):
                await first_token_s(engine, rng)
        return [await first_token_s(engine, rng) for _ in range(FIRST)]
    finally:
        engine.close()


def compare_starts(repeats: int = 3) -> dict[str, Any]:
    """Fresh processes, in turns; the middle one of each kind counts."""
    found: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(repeats):
        for kind, spreads in found.items():
            done = subprocess.run(
                [sys.executable, "-m", "engine.bench.soak", "--first-tokens", kind],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                timeout=600,
            )
            spreads.append(spread(json.loads(done.stdout.splitlines()[-1])))
    cold, warm = (float(np.median(found[kind])) for kind in ("cold", "warm"))
    return {
        "ok": warm <= cold / 3,
        "cold_std_ms": [ms(s) for s in found["cold"]],
        "warm_std_ms": [ms(s) for s in found["warm"]],
        "ratio": round(warm / cold, 3),
    }


def measure(minutes: float) -> dict[str, Any]:
    before = machine()
    data = asyncio.run(soak(60 * minutes))
    return {**data, "machine_before": before, "machine_after": machine()}


def main() -> None:
    """Print JSON; exit 1 when memory grew or the warm start is not steadier."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first-tokens", choices=("cold", "warm"), help="only that, as a list")
    options = parser.parse_args()
    if options.first_tokens:
        times = asyncio.run(first_tokens(options.first_tokens == "warm"))
        sys.stdout.write(json.dumps(times) + "\n")
        return
    parts = {"soak": lambda: measure(options.minutes), "starts": compare_starts}
    fine = True
    for name, part in parts.items():
        data = part()
        fine &= data["ok"]
        # as they come: the first one takes long
        sys.stdout.write(json.dumps({name: data}, indent=1) + "\n")
        sys.stdout.flush()
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
