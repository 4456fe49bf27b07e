"""What do batch-independent row bits cost? ``python -m engine.bench.deterministic``.

Decodes the same contexts with deterministic=True and False, alternately in one process on one
thread, and prints milliseconds a step and the ratio. Times are CPU seconds of the engine thread, so
that other processes of the machine disturb less; only the ratio travels between machines.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.config import EngineConfig
from engine.light.engine import LightEngine
from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.runtime.types import ContextPolicy, DrawKey, StepRequest
from engine.runtime.weights import make_weight_set


@dataclass(slots=True)
class Timing:
    """CPU milliseconds of engine steps (decode) and microseconds of prompt rows (prefill)."""

    decode_ms: list[float] = field(default_factory=list)
    prefill_us: list[float] = field(default_factory=list)

    def line(self, name: str, num_contexts: int) -> str:
        p50 = statistics.median(self.decode_ms)
        return (
            f"{name:<14} decode {p50:7.2f} ms/step = {1e3 * num_contexts / p50:8.0f} tokens/s, "
            f"best {min(self.decode_ms):.2f} ms; prefill {statistics.median(self.prefill_us):.0f} "
            "us/token"
        )


@dataclass(frozen=True, slots=True)
class Report:
    num_contexts: int
    deterministic: Timing
    fast: Timing

    @property
    def ratio(self) -> float:
        """Time of a deterministic decode step over a fast one (medians)."""
        return statistics.median(self.deterministic.decode_ms) / statistics.median(
            self.fast.decode_ms
        )


def measure(
    model: ModelConfig, num_contexts: int, prompt_length: int, num_tokens: int, num_repeats: int
) -> Report:
    """Alternate the two engines ``num_repeats`` times."""
    torch.set_num_threads(1)
    tensors = {name: t.numpy() for name, t in PolicyModel(model).state_dict().items()}
    # the head starts at zero; a policy that prefers tokens routes and samples like a trained one
    shape = (model.vocab_size, model.hidden_size)
    tensors["lm_head"] = 0.1 * np.random.default_rng(0).standard_normal(shape, np.float32)
    weights = make_weight_set(1, tensors, {})
    report = Report(num_contexts, Timing(), Timing())
    for _ in range(num_repeats):
        for timing, deterministic in ((report.deterministic, True), (report.fast, False)):
            config = EngineConfig(
                deterministic=deterministic,
                max_contexts=num_contexts,
                max_context=prompt_length + num_tokens + 2,
            )
            engine = LightEngine(model, config, fetch_weights=lambda version: weights)
            try:
                asyncio.run(_decode(engine, timing, num_contexts, prompt_length, num_tokens))
            finally:
                engine.close()
    return report


async def _decode(
    engine: LightEngine, timing: Timing, num_contexts: int, prompt_length: int, num_tokens: int
) -> None:
    prompt = [1 + i % 50 for i in range(prompt_length)]
    contexts = [
        await engine.init_context(prompt, ContextPolicy(draw=DrawKey(1, sample=sample)))
        for sample in range(num_contexts)
    ]
    begin = _engine_seconds(engine)
    await asyncio.gather(*(engine.forward_step(StepRequest(ctx, 1)) for ctx in contexts))
    spent = _engine_seconds(engine) - begin
    timing.prefill_us.append(1e6 * spent / (num_contexts * prompt_length))
    for _ in range(num_tokens):
        begin = _engine_seconds(engine)
        await asyncio.gather(*(engine.forward_step(StepRequest(ctx, 1)) for ctx in contexts))
        timing.decode_ms.append(1e3 * (_engine_seconds(engine) - begin))


def _engine_seconds(engine: LightEngine) -> float:
    """CPU seconds of the engine's thread so far."""
    return time.clock_gettime(time.pthread_getcpuclockid(engine.thread_ident))


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=90)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    report = measure(
        ModelConfig(), options.contexts, options.prompt, options.tokens, options.repeats
    )
    lines = [
        f"{options.contexts} contexts of {options.prompt}+ tokens, demo model, 1 thread of "
        f"{os.cpu_count()}, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, "
        f"{platform.machine()}",
        report.deterministic.line("deterministic", options.contexts),
        report.fast.line("fast", options.contexts),
        f"deterministic / fast decode time: {report.ratio:.2f}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
