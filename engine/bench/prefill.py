"""How fast is a prompt read? Part of ``python -m engine.bench.attention --prefill 4096,8192``.

One layer, attention alone, on one thread: tokens a second over a whole prompt, from queries at
``PLACES`` places of it (what is between grows with the position in a straight line, so the mean of
the places' times is the prompt's). Full attention is the best of torch on what is seen at a place:
the earlier keys in one unmasked product with the group's heads packed as rows, plus the chunk's own
triangle, in fp32 and bf16; putting the two together is not counted, so it is a little better than
it could be. Hybrid attention is what the engine does: compiled code reads the 32 queries that share
their warm blocks together, with the bits of decoding; sparse everywhere, and as it is served, where
queries below ``dense_below`` read everything. Making codes of a block is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import native
from engine.attention.config import HybridConfig
from engine.attention.topology import warm_end
from engine.attention.view import LayerView, WarmBlocks
from engine.bench.contexts import HOT, Context, Shape, make
from engine.kvcache.quantise import BLOCK, quantise_keys, quantise_values

PLACES = 4
FULL_CHUNK = 256
"""Queries of full attention at once, far above what its products need to run at full speed."""


def prefill(shape: Shape, length: int, num_repeats: int) -> list[str]:
    """Lines for a prompt of ``length`` tokens."""
    context = make(shape, length)
    served = HybridConfig(native="require")
    sparse = served.model_copy(update={"dense_below": 0})
    full = {"full, packed rows, fp32": 0.0, "full, packed rows, bf16": 0.0}
    coding = _coding(context, num_repeats)
    hybrid = {
        "hybrid, sparse everywhere": coding,
        f"hybrid, dense below {served.dense_below}": coding,
    }
    for place in range(PLACES):
        # the middle of each of PLACES parts
        end = (2 * place + 1) * length // (2 * PLACES) // BLOCK * BLOCK
        for name, dtype in zip(full, (torch.float32, torch.bfloat16), strict=True):
            full[name] += _full(shape, context, end, dtype, num_repeats) / PLACES
        for name, config in zip(hybrid, (sparse, served), strict=True):
            hybrid[name] += _hybrid(shape, context, end, config, num_repeats) / PLACES
    best = min(full.values())
    lines = [f"prompt of {length} tokens (coding {coding * 1e6:.0f} us of a token's time)"]
    for name, seconds in (full | hybrid).items():
        ratio = best / seconds
        lines.append(f"  {name:<32} {1 / seconds:8.0f} tokens/s, {ratio:5.2f} x the best full")
    return lines


def _full(shape: Shape, context: Context, end: int, dtype: torch.dtype, repeats: int) -> float:
    """Seconds a query of a chunk that ends at ``end``."""
    chunk = min(FULL_CHUNK, end)
    packed = shape.heads // shape.groups
    generator = torch.Generator().manual_seed(end)
    q = torch.randn(1, shape.groups, packed, chunk, shape.dim, generator=generator).to(dtype)
    k, v = (x[None, :, :end].to(dtype) for x in (context.k, context.v))
    before = end - chunk
    rows = q.flatten(2, 3)
    heads = q.flatten(1, 2)
    own_k, own_v = (x[:, :, before:].repeat_interleave(packed, dim=1) for x in (k, v))

    def step() -> None:
        if before:
            F.scaled_dot_product_attention(rows, k[:, :, :before], v[:, :, :before])
        F.scaled_dot_product_attention(heads, own_k, own_v, is_causal=True)

    return _best(step, repeats) / chunk


def _hybrid(shape: Shape, context: Context, end: int, config: HybridConfig, repeats: int) -> float:
    """Seconds a query of the 32 before position ``end``, which share their warm blocks."""
    generator = torch.Generator().manual_seed(end)
    q = torch.randn(BLOCK, shape.heads, shape.dim, generator=generator) * shape.dim**-0.5
    out = torch.empty(BLOCK, shape.heads, shape.dim)
    lists = shape.heads // shape.groups
    selected = torch.full((BLOCK, shape.groups, lists, config.topk), -1, dtype=torch.int32)
    view = _view_at(context, end - 1)

    def step() -> None:
        rows = native.Rows(native.load(), config, q, out, selected)
        rows.add(view, 0, BLOCK)
        rows.run(1)

    return _best(step, repeats) / BLOCK


def _view_at(context: Context, length: int) -> LayerView:
    """The context when it had ``length`` tokens."""
    hot_from, warm = warm_end(length, HOT), None
    if hot_from > BLOCK and context.view.warm is not None:
        slots = torch.arange(hot_from // BLOCK - 1)
        warm = WarmBlocks(context.view.warm.keys, context.view.warm.values, slots + 1, slots)
    sink_k, sink_v = (x[:, :BLOCK].float() for x in (context.k, context.v))
    hot_k, hot_v = (x[:, hot_from:length].float() for x in (context.k, context.v))
    return LayerView(length, sink_k, sink_v, hot_k, hot_v, warm)


def _coding(context: Context, repeats: int) -> float:
    """Seconds a token to make codes of a block, spread over its tokens."""

    def blocks(x: Tensor) -> Tensor:
        return x[:, : 4 * BLOCK].float().unflatten(1, (-1, BLOCK)).transpose(0, 1)

    k, v = blocks(context.k), blocks(context.v)

    def step() -> None:
        quantise_keys(k)
        quantise_values(v)

    return _best(step, repeats) / (4 * BLOCK)


def _best(step: Callable[[], None], repeats: int) -> float:
    """CPU seconds; the first run warms up and is not counted."""
    step()
    spent: list[float] = []
    for _ in range(repeats):
        begin = time.thread_time()
        step()
        spent.append(time.thread_time() - begin)
    return min(spent)
