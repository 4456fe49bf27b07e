"""What does the hot-zone controller cost? ``python -m engine.bench.hot_zone [--engine]``.

``--engine``: the share of LightEngine's own decode steps that engine.light.hot_watch takes, with
SmolLM2-135M (``make smollm2``). Without it:

One call = the signal of one layer's softmax weights, one head of each group, plus the decision. It
is set against a decode step of one context: every layer's attention with the group packed as query
rows, projections and feed-forward, fp32, one thread; once reading everything, once only sink,
window and retrieved tokens, each with the weights that such a step has. Times are CPU seconds of
the thread, the best of the repeats, taken in turns. Only the share travels between machines.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.bench.kv_texts import HAYSTACK, smollm2, token_ids
from engine.chat.load import load_tokenizer
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.kvcache.hot_zone import HotZoneConfig, HotZoneController, hot_signal
from engine.kvcache.quantise import BLOCK
from engine.light.scheduler import Scheduler
from engine.light.steps import Call
from engine.light.tiered_contexts import TieredTable
from engine.model.checkpoint.load import load_model
from engine.model.config import ModelConfig
from engine.runtime.types import ContextId, ContextPolicy, StepRequest, StepResult, WeightSet
from engine.runtime.weights import make_weight_set

SINK, WINDOW, RETRIEVED = 32, 1024, 256


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder of about 0.2 billion numbers; small, so that the share is not flattered."""

    layers: int = 8
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 2048
    width: int = 4096


@dataclass(frozen=True, slots=True)
class Cost:
    context: int
    name: str
    controller_ms: float
    step_ms: float

    @property
    def share(self) -> float:
        return self.controller_ms / self.step_ms

    def line(self) -> str:
        return (
            f"{self.context:>8} tokens, {self.name:<6} controller {self.controller_ms:6.3f} ms a "
            f"call = {self.share:6.2%} of a step of {self.step_ms:.1f} ms"
        )


class Step:
    """Decode step of one token whose attention reads ``visible`` positions."""

    def __init__(self, shape: Shape, visible: int) -> None:
        draw = torch.Generator().manual_seed(0)
        kv_dim = shape.kv_heads * shape.head_dim

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=draw) / columns**0.5

        self.shape = shape
        q_dim = shape.heads * shape.head_dim
        self.qkv = weight(q_dim + 2 * kv_dim, shape.hidden)
        self.out = weight(shape.hidden, q_dim)
        self.gate_up = weight(2 * shape.width, shape.hidden)
        self.down = weight(shape.hidden, shape.width)
        # one layer's tensors stand for all: a step must not fit a cache that a model would not
        self.k = torch.randn(shape.kv_heads, visible, shape.head_dim, generator=draw)
        self.v = torch.randn(shape.kv_heads, visible, shape.head_dim, generator=draw)
        self.x = torch.randn(1, shape.hidden, generator=draw)

    def __call__(self) -> Tensor:
        shape, x = self.shape, self.x
        group = shape.heads // shape.kv_heads
        q_dim = shape.heads * shape.head_dim
        for _ in range(shape.layers):
            q = (x @ self.qkv.T)[:, :q_dim].view(shape.kv_heads, group, shape.head_dim)
            read = torch.nn.functional.scaled_dot_product_attention(q, self.k, self.v)
            x = x + read.reshape(1, q_dim) @ self.out.T
            gate, up = (x @ self.gate_up.T).chunk(2, dim=1)
            x = x + (torch.nn.functional.silu(gate) * up) @ self.down.T
            x = x / x.norm() * shape.hidden**0.5
        return x


def measure(shape: Shape, context: int, repeats: int) -> list[Cost]:
    """Full and hybrid. The first round warms up and is not counted."""
    draw = torch.Generator().manual_seed(1)
    config = HotZoneConfig(calibration=16)
    controller = HotZoneController(config, 2048, deterministic=False)
    few = min(context, SINK + WINDOW + RETRIEVED)
    far = torch.randperm(max(0, context - SINK - WINDOW), generator=draw)[:RETRIEVED] + SINK
    window = torch.arange(max(SINK, context - WINDOW), context)
    read = torch.cat([torch.arange(SINK), far, window])
    reads: dict[str, tuple[int, Tensor | None]] = {"full": (context, None), "hybrid": (few, read)}
    runs: dict[str, Callable[[], object]] = {}
    for name, (visible, positions) in reads.items():
        logits = 3 * torch.randn(shape.kv_heads, visible, generator=draw)
        runs[f"{name} controller"] = partial(
            _decide, controller, logits.softmax(dim=1), context, positions
        )
        runs[f"{name} step"] = Step(shape, visible)
    best = dict.fromkeys(runs, float("inf"))
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            begin = time.thread_time()
            run()
            spent = 1e3 * (time.thread_time() - begin)
            if repeat:
                best[name] = min(best[name], spent)
    return [Cost(context, name, best[f"{name} controller"], best[f"{name} step"]) for name in reads]


def _decide(
    controller: HotZoneController, weights: Tensor, context: int, positions: Tensor | None
) -> int:
    signal = hot_signal(weights, context, controller.hot, positions, controller.config.step)
    return controller.observe(signal)


@dataclass(frozen=True, slots=True)
class EngineCost:
    """CPU seconds of ``steps`` decode steps of one context; ``hot``: its zone before and after."""

    context: int
    steps: int
    watch_s: float
    engine_s: float
    hot: tuple[int, int]

    @property
    def share(self) -> float:
        return self.watch_s / self.engine_s

    def line(self) -> str:
        return (
            f"{self.context:>8} tokens, LightEngine: watching {1e3 * self.watch_s / self.steps:.3f}"
            f" ms of {1e3 * self.engine_s / self.steps:.1f} ms a step = {self.share:.2%}; hot zone "
            f"{self.hot[0]} -> {self.hot[1]} tokens"
        )


def measure_engine(
    model: ModelConfig,
    weights: WeightSet,
    token_ids: Sequence[int],
    steps: int,
    zone: HotZoneConfig,
) -> EngineCost:
    """Steps after ``token_ids``, by the engine's own scheduler on this thread."""
    config = EngineConfig(
        max_context=len(token_ids) + steps + 1,
        num_blocks=(len(token_ids) + zone.maximum) // BLOCK + 64,
        num_warm_blocks=len(token_ids) // BLOCK + 64,
        deterministic=False,
        hot_zone=zone,
        report_codes=False,
    )
    scheduler = Scheduler(model, config)
    scheduler.load_now(weights)
    table = scheduler.contexts
    assert isinstance(table, TieredTable) and table.watch is not None, "as configured"
    ctx = ContextId("bench")
    table.open(ctx, list(token_ids), ContextPolicy())

    def sample(count: int) -> float:
        """CPU seconds."""
        future: Future[StepResult] = Future()
        begin = time.thread_time()
        scheduler.begin_step(Call(StepRequest(ctx, count), future, time.monotonic()))
        while scheduler.has_work:
            scheduler.step()
        spent = time.thread_time() - begin
        future.result(timeout=0)
        return spent

    sample(1)
    before, hot = table.watch.seconds, table.watch.hot_of(ctx)
    spent = sample(steps)
    watched = table.watch.seconds - before
    return EngineCost(len(token_ids), steps, watched, spent, (hot, table.watch.hot_of(ctx)))


def smollm2_cost(num_tokens: int, steps: int) -> EngineCost:
    """The packaged model on Python's reference; half of the context is warm. EngineError when it is
    not installed."""
    path = smollm2()
    ids = token_ids(HAYSTACK(), load_tokenizer(path), num_tokens, "python")
    loaded = load_model(path)
    hot = BLOCK * (num_tokens // 2 // BLOCK)
    attention = {
        "mode": "hybrid",
        "hot": hot,
        "hybrid": {"window": hot, "dense_below": 0},
    }
    config = ModelConfig.model_validate(loaded.config.model_dump() | {"attention": attention})
    tensors = {name: tensor.float().numpy() for name, tensor in loaded.state_dict().items()}
    weights = make_weight_set(1, tensors, config.model_dump(mode="json"))
    zone = HotZoneConfig(calibration=16, step=BLOCK, patience=1, maximum=2 * hot)
    return measure_engine(config, weights, ids, steps, zone)


def main() -> None:
    """Print a line a context length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--engine", action="store_true", help="LightEngine's steps, SmolLM2-135M")
    parser.add_argument("--tokens", type=int, default=2048, help="context of --engine")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of --engine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.engine:
        try:
            sys.stdout.write(smollm2_cost(options.tokens, options.steps).line() + "\n")
        except EngineError as error:
            sys.exit(f"hot_zone: {error}")
        return
    shape = Shape()
    sys.stdout.write(
        f"{shape}, 1 thread of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}, torch "
        f"{torch.__version__}\n"
    )
    for context in options.contexts:
        with torch.inference_mode():
            costs = measure(shape, context, options.repeats)
        sys.stdout.write("".join(cost.line() + "\n" for cost in costs))


if __name__ == "__main__":
    main()
