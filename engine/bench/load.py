"""Many clients at once: ``python -m engine.bench.load``.

settings: 50 clients on 12 places, plain and with the seed's two remedies (batches split into pieces
of 4, places that grow at the peak), in turns. burst: 500 requests at once, into the room that there
is by default and into one for all. vip: time to first token of requests with priority, idle and
among 50 others, against idle p99 + one decode step + one prefill chunk. summaries: what skipping
the summary branch at the peak saves. debug: what attention_debug costs, on and off. Real engines of
the demo's shape each; times are wall clock, the load of the machine is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import torch

from engine.bench.clients import (
    ENGINE,
    GREEDY,
    TINY,
    Answer,
    Clients,
    Load,
    ask,
    machine,
    ms,
    quantile,
    routed_engine,
)
from engine.config import EngineConfig
from engine.light.debug import DebugTally, PartClock
from engine.light.waiting_room import RouterConfig
from engine.model.config import ModelConfig
from engine.runtime.types import ContextPolicy, StepRequest

PLACES = RouterConfig(max_running=12)
"""Fewer than clients, so that the router has something to decide."""
SETTINGS: dict[str, tuple[EngineConfig, RouterConfig]] = {
    "plain": (ENGINE, PLACES),
    "split": (ENGINE.model_copy(update={"split_batches": 4}), PLACES),
    "growth": (ENGINE, PLACES.model_copy(update={"growth": 1.5})),
}
VIP = ContextPolicy(priority=1)
STARVED_S = 120.0
"""Longer than anything here takes: who waits so long waits for ever."""


async def settings(seconds: float, clients: int = 50, rounds: int = 3) -> dict[str, Any]:
    """Each setting for ``seconds`` in all, in turns."""
    found: dict[str, list[Load]] = {name: [] for name in SETTINGS}
    for turn in range(rounds):
        for name, (engine, router) in SETTINGS.items():
            async with routed_engine(router, engine) as (routed, _):
                group = Clients(routed)
                began, cpu = time.perf_counter(), time.process_time()
                async with asyncio.timeout(seconds / rounds + STARVED_S):
                    await group.run(clients, seconds / rounds, turn)
                spent = time.perf_counter() - began, time.process_time() - cpu
                found[name].append(Load.of(group, *spent))
    loads = {name: [load.data() for load in loads] for name, loads in found.items()}
    rates = {n: float(np.median([x.tokens_per_s for x in v])) for n, v in found.items()}
    work = {n: float(np.median([x.tokens_per_cpu_s for x in v])) for n, v in found.items()}
    waits = {n: float(np.median([x.total_ms_p99 for x in v])) for n, v in found.items()}
    lost = sum(load.lost for loads in found.values() for load in loads)
    wrong = {k for loads in found.values() for x in loads for k in x.outcomes} - {"ok", "shed"}
    return {
        "ok": not lost and not wrong,
        "clients": clients,
        "lost": lost,
        "most_tokens_per_cpu_s": max(work, key=lambda name: work[name]),
        "tokens_per_s": rates,
        "tokens_per_cpu_s": work,
        "total_ms_p99": waits,
        "rounds": loads,
    }


async def burst(count: int = 500, num_tokens: int = 8) -> dict[str, Any]:
    """All at once: each is answered or told when to come back."""
    rooms = {
        "default": RouterConfig(),
        "for all": RouterConfig(max_waiting=count, waiting_factor=count),
    }
    found: dict[str, Any] = {}
    for name, router in rooms.items():
        async with routed_engine(router) as (routed, light):
            began = time.perf_counter()
            rng = np.random.default_rng(0)
            prompts = rng.integers(0, TINY.vocab_size, (count, 32)).tolist()
            async with asyncio.timeout(STARVED_S):
                answers = await asyncio.gather(*(ask(routed, p, num_tokens) for p in prompts))
            seconds = time.perf_counter() - began
            waiting = min(router.max_waiting, router.waiting_factor * router.max_running)
            room = router.max_running - router.reserved + waiting
            found[name] = _burst(answers, seconds, min(count, room))
            found[name]["contexts_left"] = (await light.info()).num_contexts
    return {"ok": all(f["ok"] and not f["contexts_left"] for f in found.values()), **found}


def _burst(answers: list[Answer], seconds: float, room: int) -> dict[str, Any]:
    outcomes = Counter(answer.outcome for answer in answers)
    shed = [answer for answer in answers if answer.outcome == "shed"]
    return {
        "ok": set(outcomes) <= {"ok", "shed"}
        and outcomes["ok"] >= room
        and all(answer.retry_after_s >= 1 for answer in shed),
        "asked": len(answers),
        "outcomes": dict(outcomes),
        "room": room,
        "seconds": round(seconds, 2),
        "first_ms_p99": ms(quantile([a.first_s for a in answers if a.outcome == "ok"], 0.99)),
    }


async def vip(seconds: float, clients: int = 50, idle_samples: int = 60) -> dict[str, Any]:
    """A request with priority every 100 ms, idle and among the others."""
    prompt = list(range(48))
    async with routed_engine(PLACES) as (routed, light):
        idle = [await ask(routed, prompt, 4, VIP) for _ in range(idle_samples)]
        chunk = [await ask(light, _chunk(seed), 1) for seed in range(idle_samples // 3)]
        group = Clients(routed)
        load = asyncio.create_task(group.run(clients, seconds))
        loaded: list[Answer] = []
        await asyncio.sleep(min(1.0, seconds / 4))
        while not load.done():
            loaded.append(await ask(routed, prompt, 4, VIP))
            await asyncio.sleep(0.1)
        async with asyncio.timeout(STARVED_S):
            await load
    steps = [gap for answer in group.answers for gap in answer.gaps_s]
    idle_p99 = quantile([a.first_s for a in idle], 0.99)
    step_p99, chunk_p99 = quantile(steps, 0.99), quantile([a.first_s for a in chunk], 0.99)
    served = [a.first_s for a in loaded if a.outcome == "ok"]
    bound, p99 = idle_p99 + step_p99 + chunk_p99, quantile(served, 0.99)
    others = [a.first_s for a in group.answers if a.outcome == "ok"]
    return {
        "ok": len(served) == len(loaded) and p99 <= bound,
        "vip_requests": len(loaded),
        "vip_outcomes": dict(Counter(a.outcome for a in loaded)),
        "idle_first_ms_p99": ms(idle_p99),
        "decode_step_ms_p99": ms(step_p99),
        "prefill_chunk_ms_p99": ms(chunk_p99),
        "bound_ms": ms(bound),
        "loaded_first_ms_p50": ms(quantile(served, 0.5)),
        "loaded_first_ms_p99": ms(p99),
        "others_first_ms_p99": ms(quantile(others, 0.99)),
        "others": dict(Counter(a.outcome for a in group.answers)),
    }


def _chunk(seed: int) -> list[int]:
    """A prompt that fills one batch."""
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, ENGINE.max_rows).tolist()


def hybrid(summary_weight: float) -> ModelConfig:
    """The demo's shape with sparse attention from the first tokens on."""
    section = {"window": 64, "topk": 32, "candidates": 128, "dense_below": 0}
    summaries = {"summary_weight": summary_weight, "summaries": "mean"}
    attention = {"mode": "hybrid", "hot": 64, "hybrid": section | summaries}
    return ModelConfig.model_validate(TINY.model_dump() | {"attention": attention})


async def summaries(num_tokens: int = 24, length: int = 512, rounds: int = 3) -> dict[str, Any]:
    """Decoding 4 contexts of ``length`` tokens with the branch and without it, in turns."""
    engine = ENGINE.model_copy(update={"max_context": 2048})
    times: dict[bool, list[float]] = {False: [], True: []}
    async with routed_engine(RouterConfig(), engine, hybrid(0.7)) as (_, light):
        rng = np.random.default_rng(0)
        contexts = [
            await light.init_context(rng.integers(0, 320, length).tolist(), ContextPolicy())
            for _ in range(4)
        ]
        await asyncio.gather(*(light.forward_step(StepRequest(c, 1, GREEDY)) for c in contexts))
        for _ in range(rounds):
            for skip in times:
                light.skip_summaries(skip)
                began = time.perf_counter()
                steps = (light.forward_step(StepRequest(c, num_tokens, GREEDY)) for c in contexts)
                await asyncio.gather(*steps)
                times[skip].append((time.perf_counter() - began) / num_tokens)
    on, off = float(np.median(times[False])), float(np.median(times[True]))
    return {
        "ok": off < on,
        "context": length,
        "step_ms_with": ms(on),
        "step_ms_skipped": ms(off),
        "saved": round(1 - off / on, 3),
    }


async def debug(num_tokens: int = 64, rounds: int = 5) -> dict[str, Any]:
    """Time of a step with attention_debug; and, off, of all that asks whether it is on."""
    times: dict[bool, list[float]] = {False: [], True: []}
    report: dict[str, Any] | None = None
    async with routed_engine(RouterConfig(), ENGINE, hybrid(0.0)) as (_, light):
        ctx = await light.init_context(list(range(300)), ContextPolicy())
        await light.forward_step(StepRequest(ctx, 1, GREEDY))
        for _ in range(rounds):
            for on in times:
                child = await light.fork(ctx)
                began = time.perf_counter()
                result = await light.forward_step(StepRequest(child, num_tokens, GREEDY, debug=on))
                times[on].append((time.perf_counter() - began) / num_tokens)
                report = result.debug or report
                await light.release(child)
    off_s, on_s = float(np.median(times[False])), float(np.median(times[True]))
    asks_s = _seconds_of_asking()
    return {
        "ok": asks_s < 0.01 * off_s,
        "step_ms_off": ms(off_s),
        "step_ms_on": ms(on_s),
        "asking_us_when_off": round(1e6 * asks_s, 3),
        "overhead_when_off": round(asks_s / off_s, 6),
        "report": report,
    }


def _seconds_of_asking(contexts: int = 1) -> float:
    """What a batch of the scheduler does more when nobody is watched: the same expressions."""

    class Step:
        debug: DebugTally | None = None

    class Context:
        step: Step | None = Step()

    plan, clock, n = [(Context(), [0])] * contexts, None, 20_000
    began = time.perf_counter()
    for _ in range(n):
        watched = [c.step.debug for c, _ in plan if c.step is not None and c.step.debug is not None]
        clock = PartClock() if watched else None
        for _ in range(4):  # pieces, rows, two places after the batch
            if clock is not None:
                raise AssertionError("nobody is watched")
    return (time.perf_counter() - began) / n


PARTS: dict[str, Callable[[float], Coroutine[Any, Any, dict[str, Any]]]] = {
    "settings": settings,
    "burst": lambda seconds: burst(),
    "vip": vip,
    "summaries": lambda seconds: summaries(),
    "debug": lambda seconds: debug(),
}


def measure(part: str, seconds: float) -> dict[str, Any]:
    """One part; data["ok"] says whether it holds."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    before = machine()
    data = asyncio.run(PARTS[part](seconds))
    return {**data, "machine_before": before, "machine_after": machine()}


def main() -> None:
    """Print each part as JSON; exit 1 when one does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of settings and vip, each")
    parser.add_argument("--part", choices=list(PARTS), action="append")
    options = parser.parse_args()
    fine = True
    for part in options.part or PARTS:
        data = measure(part, options.seconds)
        fine &= data["ok"]
        sys.stdout.write(json.dumps({part: data}, indent=1) + "\n")
        sys.stdout.flush()
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
