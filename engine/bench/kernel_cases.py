"""Inputs of the kernel bench: one layer of a decode step at the size of an 8B model, latent
attention and experts at that of K2.5.

Bytes are what a kernel must move at least; beside the time they say how far it is from the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels.code_scan import code_scan
from engine.kernels.decode_attn_latent import decode_attn_latent
from engine.kernels.decode_attn_tiered import decode_attn_tiered
from engine.kernels.dispatch import Implementation
from engine.kernels.gathered_attn import gathered_attn, gathered_scores
from engine.kernels.kv_append import kv_append
from engine.kernels.kv_dequant import dequantise_keys, dequantise_values
from engine.kernels.kv_quantise_block import kv_quantise_block
from engine.kernels.lse_merge import lse_merge
from engine.kernels.moe_grouped_gemm import moe_grouped_gemm
from engine.kernels.moe_route import moe_route
from engine.kernels.prefill_hybrid import Visibility, pack_positions, prefill_hybrid
from engine.kernels.summary_attn import summary_attn
from engine.kernels.tiered import FULL, WARM, TieredLayer
from engine.kernels.topk_select import topk_select
from engine.kvcache.quantise import BLOCK, WarmKeys, WarmValues


@dataclass(frozen=True, slots=True)
class Size:
    contexts: int = 8
    context_length: int = 32768
    heads: int = 32
    groups: int = 8
    head_dim: int = 128
    hot: int = 2048
    window: int = 1024
    candidates: int = 256
    topk: int = 64
    latent_heads: int = 64
    rank: int = 512
    rope: int = 64
    experts: int = 384
    top_k: int = 8
    hidden: int = 7168
    width: int = 2048
    rows: int = 64
    prefill: int = 512

    @classmethod
    def smallest(cls) -> Size:
        """Same shapes inside a program, almost no work: to compile or to try."""
        return cls(
            contexts=1, context_length=4096, experts=16, hidden=1024, width=512, rows=4, prefill=32
        )


@dataclass(frozen=True, slots=True)
class Case:
    kernel: str
    """Key of engine.kernels.launch.SETTINGS; of several kernels the one that matters."""
    run: Callable[[Implementation], Any]
    num_bytes: int


def cases(size: Size, device: str, dtype: torch.dtype) -> list[Case]:
    """Every op once, in the order of a decode step."""
    make = Maker(size, device, dtype)
    return [*_cache(make), *_retrieval(make), *_attention(make), *_experts(make)]


class Maker:
    def __init__(self, size: Size, device: str, dtype: torch.dtype) -> None:
        self.size, self.device, self.dtype = size, device, dtype
        self._generator = torch.Generator(device=device).manual_seed(0)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        kind = {"dtype": dtype or self.dtype, "device": self.device}
        return torch.randn(*shape, generator=self._generator, **kind)

    def randint(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        kind = {"dtype": dtype, "device": self.device}
        return torch.randint(0, high, shape, generator=self._generator, **kind)

    def whole(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def warm_keys(self, blocks: int, groups: int, dim: int) -> WarmKeys:
        top, mid, low = (
            self.randint(256, blocks, groups, n, BLOCK, dtype=torch.uint8)
            for n in (dim // 4, dim // 4, dim // 2)
        )
        minimum = self.randn(blocks, groups, dim, dtype=torch.float16)
        return WarmKeys(top, mid, low, minimum, minimum.abs() / 100)

    def layer(self, groups: int, dim: int, value_dim: int | None) -> TieredLayer:
        """All contexts alike: the sink, warm blocks up to the last ``hot`` tokens, hot ones."""
        size = self.size
        blocks = size.context_length // BLOCK
        warm = blocks - 1 - size.hot // BLOCK
        full = blocks - warm
        table = torch.zeros(size.contexts, blocks, dtype=torch.int32, device=self.device)
        tiers = torch.full_like(table, FULL, dtype=torch.int8)
        tiers[:, 1 : 1 + warm] = WARM
        number = torch.arange(size.contexts, dtype=torch.int32, device=self.device)[:, None]
        for part, count in ((tiers[0] == WARM, warm), (tiers[0] == FULL, full)):
            slots = torch.arange(count, dtype=torch.int32, device=self.device)
            table[:, part] = number * count + slots
        pool = size.contexts * warm
        values = full_v = None
        if value_dim is not None:
            codes = self.randint(255, pool, groups, BLOCK, value_dim, dtype=torch.uint8)
            scale = self.randn(pool, groups, BLOCK, dtype=torch.float16).abs() / 100
            values = WarmValues(codes.view(torch.int8), scale)
            full_v = self.randn(size.contexts * full, groups, BLOCK, value_dim)
        full_k = self.randn(size.contexts * full, groups, BLOCK, dim)
        return TieredLayer(full_k, full_v, self.warm_keys(pool, groups, dim), values, table, tiers)


def _cache(make: Maker) -> list[Case]:
    s = make.size
    wide = (s.contexts, s.groups, BLOCK, s.head_dim)
    k, v, pool = make.randn(*wide), make.randn(*wide), make.randn(*wide)
    row = make.randn(s.contexts, s.groups, s.head_dim)
    slots = torch.arange(s.contexts, device=make.device) * BLOCK + 5
    keys, values = kv_quantise_block(k, v, implementation="torch")
    assert values is not None, "values were given"
    numbers = k.numel()
    return [
        Case(
            "kv_append",
            lambda how: kv_append(pool, pool, slots, row, row, how),
            4 * row.numel() * row.element_size(),
        ),
        Case(
            "kv_quantise_keys",
            lambda how: kv_quantise_block(k, v, "k8v8", how, check=False),
            2 * numbers * (k.element_size() + 1),
        ),
        Case(
            "kv_dequant",
            lambda how: (dequantise_keys(keys, how), dequantise_values(values, how)),
            2 * numbers * 5,
        ),
    ]


def _retrieval(make: Maker) -> list[Case]:
    s = make.size
    layer = make.layer(s.groups, s.head_dim, s.head_dim)
    q = make.randn(s.contexts, s.heads, s.head_dim)
    starts = make.whole(*[s.context_length - s.window] * s.contexts)
    scale = s.head_dim**-0.5
    scores = make.randn(s.contexts, s.groups, s.context_length, dtype=torch.float32)
    candidates = make.randint(s.context_length, s.contexts, s.groups, s.candidates)
    chosen = make.randint(s.context_length, s.contexts, s.heads, s.topk)
    per_token = s.head_dim // 4 + s.head_dim // 8  # a plane, and fp16 minimum and scale by block
    return [
        Case(
            "code_scan",
            lambda how: code_scan(q, layer, starts, scale, implementation=how),
            s.contexts * s.groups * s.context_length * (per_token + 4),
        ),
        Case(
            "topk_select",
            lambda how: topk_select(scores, s.candidates, how),
            scores.numel() * 4,
        ),
        Case(
            "gathered_scores",
            lambda how: gathered_scores(q, layer, candidates, scale, how),
            candidates.numel() * 5 * s.head_dim,
        ),
        Case(
            "gathered_attn",
            lambda how: gathered_attn(q, layer, chosen, scale, how),
            chosen.numel() * 6 * s.head_dim,
        ),
    ]


def _attention(make: Maker) -> list[Case]:
    s = make.size
    layer = make.layer(s.groups, s.head_dim, s.head_dim)
    latent = make.layer(1, s.rank + s.rope, None)
    q = make.randn(s.contexts, s.heads, s.head_dim)
    absorbed = make.randn(s.contexts, s.latent_heads, s.rank + s.rope)
    lengths = make.whole(*[s.context_length] * s.contexts)
    chosen = make.randint(s.context_length, s.contexts, 1, s.topk)
    everything = lengths * 0
    blocks = s.context_length // BLOCK
    means = make.randn(s.contexts, s.groups, blocks, s.head_dim)
    counts = torch.full((s.contexts, s.heads, blocks), BLOCK, device=make.device)
    parts = make.randn(4, s.contexts, s.heads, s.head_dim, dtype=torch.float32)
    lses = make.randn(4, s.contexts, s.heads, dtype=torch.float32)
    tokens = s.contexts * s.context_length
    return [
        Case(
            "decode_attn_tiered",
            lambda how: decode_attn_tiered(q, layer, lengths, everything, 0.1, how),
            tokens * s.groups * 2 * s.head_dim,
        ),
        Case(
            "decode_attn_latent",
            lambda how: decode_attn_latent(absorbed, latent, s.rank, lengths, everything, 0.1, how),
            tokens * (s.rank + s.rope),
        ),
        Case(
            "gathered_attn_latent",
            lambda how: gathered_attn(absorbed, latent, chosen, 0.1, how, s.rank),
            chosen.numel() * (s.rank + s.rope),
        ),
        Case(
            "summary_attn",
            lambda how: summary_attn(q, means, means, counts, 0.1, 0.7, how),
            2 * means.numel() * means.element_size(),
        ),
        Case("lse_merge", lambda how: lse_merge(parts, lses, how), 4 * parts.numel()),
        _prefill(make),
    ]


def _prefill(make: Maker) -> Case:
    """The last chunk of a prompt of 4,096, one context."""
    s = make.size
    length = min(4096, s.context_length)
    q = make.randn(1, s.prefill, s.heads, s.head_dim)
    k, v = (make.randn(1, length, s.groups, s.head_dim) for _ in range(2))
    chosen = BLOCK + make.randint(length - s.prefill - s.window - BLOCK, 1, s.prefill, s.heads, 64)
    bits = pack_positions(chosen, length)
    see = Visibility(window=s.window, hot=s.hot)
    sizes = (make.whole(length - s.prefill), make.whole(s.prefill))
    return Case(
        "prefill_hybrid",
        lambda how: prefill_hybrid(q, k, v, k, v, bits, *sizes, see, 0.1, how),
        2 * k.numel() * k.element_size() + bits.numel() * 4,
    )


def _experts(make: Maker) -> list[Case]:
    s = make.size
    logits = make.randn(s.rows, s.experts, dtype=torch.float32)
    bias = make.randn(s.experts, dtype=torch.float32)
    used, weights = moe_route(logits, bias, s.top_k, implementation="torch")
    x = make.randn(s.rows, s.hidden)
    gate_up = make.randn(s.experts, 2 * s.width, s.hidden)
    down = make.randn(s.experts, s.hidden, s.width)
    touched = len(used.unique())
    return [
        Case("moe_route", lambda how: moe_route(logits, bias, s.top_k, implementation=how), 0),
        Case(
            "moe_up",
            lambda how: moe_grouped_gemm(x, used, weights, gate_up, down, how),
            touched * 3 * s.width * s.hidden * x.element_size(),
        ),
    ]
