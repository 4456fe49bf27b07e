"""How fast is hybrid attention? ``python -m engine.bench.attention [--contexts 8192,32768]``.

One decode step of one layer, for the same random context: the best full attention of torch (the
group's heads packed as rows of one SDPA call, in fp32 and bf16, and a product per key-value head in
bf16; never ``enable_gqa``, which is several times slower) and hybrid attention, natively and in
torch alone, alternately in one process on one thread. Times are CPU milliseconds of the thread, the
best of the repeats; only ratios travel between machines. Everything between sink and hot tokens is
warm: nothing is cold.

A whole layer is attention and the projections of an 8B model (hidden 4096, width 14336, bf16).
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import native
from engine.attention.config import HybridConfig
from engine.attention.hybrid import attend_hybrid
from engine.attention.index import KeyCodeIndex
from engine.bench.contexts import Context, Shape, make
from engine.bench.prefill import prefill
from engine.kvcache.config import TierConfig
from engine.kvcache.layout import CacheLayout

LAYERS = 32
GIB = 2**30
HIDDEN, WIDTH = 4096, 14336
Step = Callable[[], object]


def full_steps(context: Context, with_fp32: bool) -> dict[str, Step]:
    q, k, v = context.q.unflatten(0, (len(context.k), -1)), context.k, context.v
    half = q.bfloat16()

    def by_head() -> Tensor:
        out = torch.empty_like(q)
        for group in range(len(k)):
            weights = (k[group] @ half[group].T).float().softmax(dim=0).bfloat16()
            out[group] = weights.T @ v[group]
        return out

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Step:
        return lambda: F.scaled_dot_product_attention(q[None], k[None], v[None], scale=1.0)

    steps: dict[str, Step] = {
        "full, packed rows, bf16": packed(half, k, v),
        "full, product per head, bf16": by_head,
    }
    if with_fp32:
        steps["full, packed rows, fp32"] = packed(q, k.float(), v.float())
    return steps


def hybrid_steps(context: Context, with_codes: bool) -> dict[str, Step]:
    def step(config: HybridConfig, index: KeyCodeIndex | None) -> Step:
        return lambda: attend_hybrid(context.q, context.view, config, index, scale=1.0)

    off = HybridConfig(native="off")
    quick = off.model_copy(update={"index": "int8"})
    steps = {"hybrid, torch, int8 copy": step(quick, KeyCodeIndex("int8"))}
    if with_codes:
        steps["hybrid, torch, 2-bit codes"] = step(off, KeyCodeIndex("codes"))
    if native.unavailable() is None:
        steps["hybrid, native, 2-bit codes"] = step(HybridConfig(native="require"), None)
    return steps


def measure(steps: dict[str, Step], num_repeats: int) -> dict[str, float]:
    """CPU milliseconds, the best of the repeats; the first round warms up and is not counted."""
    best = dict.fromkeys(steps, float("inf"))
    for repeat in range(num_repeats + 1):
        for name, step in steps.items():
            begin = time.thread_time()
            step()
            spent = time.thread_time() - begin
            if repeat:
                best[name] = min(best[name], spent * 1e3)
    return best


def layer_step() -> Step:
    """The projections of one token through one layer."""
    sizes = [(HIDDEN, 6144), (4096, HIDDEN), (HIDDEN, 2 * WIDTH), (WIDTH, HIDDEN)]
    weights = [torch.zeros(outputs, inputs, dtype=torch.bfloat16) for inputs, outputs in sizes]
    for weight in weights:
        weight.fill_(0.01)
    rows = [torch.ones(1, inputs, dtype=torch.bfloat16) for inputs, _ in sizes]

    def step() -> None:
        for row, weight in zip(rows, weights, strict=True):
            F.linear(row, weight)

    return step


def table(length: int, best: dict[str, float]) -> list[str]:
    full = min(ms for name, ms in best.items() if name.startswith("full"))
    lines = [f"{length} tokens"]
    for name, ms in best.items():
        lines.append(f"  {name:<32} {ms:8.2f} ms, best full is {full / ms:5.2f} x that")
    return lines


def memory(shape: Shape) -> list[str]:
    tiers = TierConfig()
    layout = CacheLayout(LAYERS, shape.groups, shape.dim, shape.dim, tiers.profile)
    lines = [f"contexts of 120K tokens a GiB, {LAYERS} layers"]
    context = 120 * 1024
    full, tiered = layout.bf16_bytes(context), layout.bytes(context, tiers).device
    lines.append(f"  bf16 {GIB / full:.3f}, tiered {GIB / tiered:.3f} (on the device)")
    return lines


def latency(shape: Shape, num_repeats: int) -> list[str]:
    """Issue 5: a token at 64K against one at 32K, attention alone and with its layer."""
    if native.unavailable() is not None:
        return []
    steps = {"layer": layer_step()}
    for length in (32768, 65536):
        hybrid = hybrid_steps(make(shape, length), with_codes=False)
        steps[str(length)] = next(step for name, step in hybrid.items() if "native" in name)
    best = measure(steps, num_repeats)
    short, long, rest = best["32768"], best["65536"], best["layer"]
    return [
        "decode latency at 64K against 32K, native",
        f"  attention alone {long:.2f} ms : {short:.2f} ms = {long / short:.2f} x",
        f"  with the layer's projections ({rest:.1f} ms) {(long + rest) / (short + rest):.2f} x",
    ]


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="8192,32768,131072")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fp32", action="store_true", help="packed rows in fp32 as well")
    parser.add_argument("--codes", action="store_true", help="2-bit codes in torch as well: slow")
    parser.add_argument("--no-latency", action="store_true")
    parser.add_argument("--prefill", default="4096,8192,16384,32768", help="Prompts; '' for none.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape()
    reason = native.unavailable()
    kind = native.best_instructions() if reason is None else f"none ({reason})"
    sys.stdout.write(
        f"{shape.heads} query heads, {shape.groups} key-value heads x {shape.dim}, one layer, "
        f"1 thread of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, "
        f"{platform.machine()}, native: {kind}\n"
    )
    for text in options.contexts.split(","):
        length = int(text)
        context = make(shape, length)
        steps = full_steps(context, options.fp32) | hybrid_steps(context, options.codes)
        sys.stdout.write("\n".join(table(length, measure(steps, options.repeats))) + "\n")
        sys.stdout.flush()
    if not options.no_latency:
        sys.stdout.write("\n".join(latency(shape, options.repeats)) + "\n")
    for text in filter(None, options.prefill.split(",") if reason is None else []):
        lines = prefill(shape, int(text), options.repeats)
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
    sys.stdout.write("\n".join(memory(shape)) + "\n")


if __name__ == "__main__":
    main()
