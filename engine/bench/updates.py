"""New weights under load: ``python -m engine.bench.updates``.

Clients keep asking while two sets of weights take turns. The engine is deterministic, so every
answer can be computed again on a quiet engine with the weights that it names: one token of another
version, or of KV that an older version computed, and they differ. Half of the clients keep their
context over the updates and go on in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.bench.clients import ENGINE, GREEDY, machine, make_weights, ms, quantile
from engine.config import EngineConfig
from engine.light.engine import LightEngine
from engine.model.config import ModelConfig
from engine.runtime.types import ContextPolicy, StepRequest, StepResult, WeightSet

MODEL = ModelConfig(num_hidden_layers=2, max_position_embeddings=512)
CONFIG = ENGINE.model_copy(update={"deterministic": True, "max_context": 384, "max_rows": 128})
TURNS, TOKENS, OBSERVED = 4, 6, 5
CONTRAST = 30.0
"""Heads of random weights this much louder, so that versions sample different tokens."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One step: what the context held before it, and what came."""

    before: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


@dataclass(slots=True)
class Traffic:
    engine: LightEngine
    seen: list[Seen] = field(default_factory=list[Seen])
    times_s: list[float] = field(default_factory=list[float])

    async def client(self, number: int, until: float) -> None:
        """Even ones keep a context for some turns, odd ones open a new one each time."""
        rng = np.random.default_rng(number)
        while time.perf_counter() < until:
            tokens = rng.integers(0, MODEL.vocab_size, 40).tolist()
            ctx = await self.engine.init_context(tokens, ContextPolicy())
            for _ in range(TURNS if number % 2 == 0 else 1):
                began = time.perf_counter()
                result = await self.engine.forward_step(StepRequest(ctx, TOKENS, GREEDY))
                self.times_s.append(time.perf_counter() - began)
                self.seen.append(_seen(tokens, result))
                more = rng.integers(0, MODEL.vocab_size, OBSERVED).tolist()
                await self.engine.append(ctx, more)
                tokens = [*tokens, *result.token_ids.tolist(), *more]
            await self.engine.release(ctx)


def _seen(tokens: Sequence[int], result: StepResult) -> Seen:
    return Seen(
        tuple(tokens),
        tuple(result.token_ids.tolist()),
        tuple(result.logprobs.tolist()),
        result.weight_version,
    )


def versions(model: ModelConfig) -> list[WeightSet]:
    """Two sets, under the numbers 1 and 2, which then take turns as 3, 4, ..."""
    return [loud(model, seed) for seed in (1, 2)]


def loud(model: ModelConfig, seed: int) -> WeightSet:
    from engine.runtime.weights import make_weight_set

    drawn = make_weights(model, seed, seed)
    tensors = dict(drawn.tensors)
    rng = np.random.default_rng(seed)
    shape = tensors["lm_head"].shape
    tensors["lm_head"] = (rng.standard_normal(shape) * CONTRAST / shape[1]).astype(np.float32)
    return make_weight_set(seed, tensors, model.model_dump(mode="json"))


async def updates(
    seconds: float, clients: int = 16, every_s: float = 1.0, checked: int = 400
) -> dict[str, Any]:
    """``checked``: answers computed again at most, spread over the run."""
    sets = versions(MODEL)
    engine = LightEngine(MODEL, CONFIG, fetch_weights=lambda version: sets[0])
    traffic = Traffic(engine)
    until = time.perf_counter() + seconds
    swaps: list[float] = []

    async def swap() -> None:
        number = 1
        while time.perf_counter() + every_s < until:
            await asyncio.sleep(every_s)
            number += 1
            began = time.perf_counter()
            await engine.load_weights(_numbered(sets[(number - 1) % 2], number))
            swaps.append(time.perf_counter() - began)

    try:
        async with asyncio.timeout(seconds + 120):
            await asyncio.gather(swap(), *(traffic.client(n, until) for n in range(clients)))
        left = (await engine.info()).num_contexts
    finally:
        engine.close()
    step = max(1, len(traffic.seen) // checked)
    wrong = await wrong_answers(sets, traffic.seen[::step])
    kept = sum(len(seen.before) > 40 for seen in traffic.seen)
    return {
        "ok": not wrong["mixed"] and not left and wrong["different"] and len(swaps) > 0,
        "answers": len(traffic.seen),
        "in_kept_contexts": kept,
        "versions_seen": len({seen.version for seen in traffic.seen}),
        "swaps": len(swaps),
        "swap_ms_p50": ms(quantile(swaps, 0.5)),
        "swap_ms_max": ms(max(swaps, default=float("nan"))),
        "step_ms_p99": ms(quantile(traffic.times_s, 0.99)),
        "contexts_left": left,
        **wrong,
    }


def _numbered(weights: WeightSet, version: int) -> WeightSet:
    """The same tensors under another number."""
    from dataclasses import replace

    return WeightSet(replace(weights.manifest, version=version), weights.tensors)


async def wrong_answers(sets: Sequence[WeightSet], seen: Sequence[Seen]) -> dict[str, Any]:
    """``mixed``: answers that a quiet engine with the weights they name gives otherwise, to the
    bit; ``different``: whether the two sets disagree at all, or nothing is shown."""
    quiet = [_quiet(weights, CONFIG) for weights in sets]
    mixed = 0
    different = False
    try:
        for one in seen:
            mine, other = quiet[(one.version - 1) % 2], quiet[one.version % 2]
            again = await _again(mine, one)
            mixed += (again.sampled, again.logprobs) != (one.sampled, one.logprobs)
            if not different:
                different = (await _again(other, one)).sampled != one.sampled
    finally:
        for engine in quiet:
            engine.close()
    return {"checked": len(seen), "mixed": mixed, "different": different}


def _quiet(weights: WeightSet, config: EngineConfig) -> LightEngine:
    return LightEngine(MODEL, config, fetch_weights=lambda version: weights)


async def _again(engine: LightEngine, seen: Seen) -> Seen:
    ctx = await engine.init_context(seen.before, ContextPolicy())
    result = await engine.forward_step(StepRequest(ctx, len(seen.sampled), GREEDY))
    await engine.release(ctx)
    return _seen(seen.before, result)


def measure(seconds: float) -> dict[str, Any]:
    before = machine()
    return {**asyncio.run(updates(seconds)), "machine_before": before, "machine_after": machine()}


def main() -> None:
    """Print JSON; exit 1 when an answer was mixed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    data = measure(parser.parse_args().seconds)
    sys.stdout.write(json.dumps(data, indent=1) + "\n")
    sys.exit(0 if data["ok"] else 1)


if __name__ == "__main__":
    main()
