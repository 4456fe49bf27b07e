"""Coding blocks that leave the hot zone: one program a block and head, bit-equal to torch."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import QuantiseError
from engine.kernels.launch import launch, padded
from engine.kvcache.quantise import BLOCK, Profile, WarmKeys, WarmValues


@triton.jit
def rounded(x):
    """To the nearest whole number, ties to even, for |x| < 2^22; no library function does that in
    the interpreter."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def half(x):
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def quantise_keys_kernel(
    keys,
    top,
    mid,
    low,
    minimum,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LITERAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)[:, None]
    token = tl.arange(0, 32)[None, :]
    inside = channel < D
    k = tl.load(keys + (row * 32 + token) * D + channel, mask=inside, other=0).to(tl.float32)
    if LITERAL:
        # one number for the block, spread over the channels
        largest = tl.max(tl.max(tl.abs(k), axis=1), axis=0)
        step = half(tl.maximum(tl.div_rn(largest, 127.0), 9.5367431640625e-07))
        step = tl.zeros([BLOCK_D, 1], tl.float32) + step
        least = half(-128.0 * step)
    else:
        least = half(tl.min(k, axis=1, keep_dims=True))
        spread = tl.max(k, axis=1, keep_dims=True) - least
        step = half(
            tl.maximum(
                tl.div_rn(spread, tl.full([BLOCK_D, 1], 255.0, tl.float32)), 9.5367431640625e-07
            )
        )
    wanted = tl.div_rn(k - least, tl.zeros([BLOCK_D, 32], tl.float32) + step)
    code = rounded(tl.minimum(tl.maximum(wanted, -1.0), 256.0))
    code = tl.minimum(tl.maximum(code, 0.0), 255.0).to(tl.int32)

    quads = tl.reshape(code, (BLOCK_D // 4, 4, 32))
    place = tl.arange(0, 4)[None, :, None] * 2
    quad = tl.arange(0, BLOCK_D // 4)[:, None]
    at = (row * (D // 4) + quad) * 32 + token
    packed = tl.sum((quads >> 6) << place, axis=1)
    tl.store(top + at, packed.to(tl.uint8), mask=quad < D // 4)
    packed = tl.sum(((quads >> 4) & 3) << place, axis=1)
    tl.store(mid + at, packed.to(tl.uint8), mask=quad < D // 4)
    pairs = tl.reshape(code & 15, (BLOCK_D // 2, 2, 32))
    pair = tl.arange(0, BLOCK_D // 2)[:, None]
    packed = tl.sum(pairs << (tl.arange(0, 2)[None, :, None] * 4), axis=1)
    tl.store(low + (row * (D // 2) + pair) * 32 + token, packed.to(tl.uint8), mask=pair < D // 2)
    tl.store(minimum + row * D + channel, least.to(tl.float16), mask=inside)
    tl.store(scale + row * D + channel, step.to(tl.float16), mask=inside)


@triton.jit
def quantise_values_kernel(
    values, codes, scale, V: tl.constexpr, BLOCK_V: tl.constexpr, LITERAL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, 32)[:, None]
    channel = tl.arange(0, BLOCK_V)[None, :]
    at = (row * 32 + token) * V + channel
    v = tl.load(values + at, mask=channel < V, other=0).to(tl.float32)
    largest = tl.max(tl.abs(v), axis=1, keep_dims=True)
    if LITERAL:
        largest = tl.zeros([32, 1], tl.float32) + tl.max(largest, axis=0, keep_dims=True)
    step = tl.div_rn(largest, tl.full([32, 1], 127.0, tl.float32))
    step = half(tl.maximum(step, 9.5367431640625e-07))
    wanted = tl.div_rn(v, tl.zeros([32, BLOCK_V], tl.float32) + step)
    code = rounded(tl.minimum(tl.maximum(wanted, -128.0), 128.0))
    code = tl.minimum(tl.maximum(code, -127.0), 127.0)
    tl.store(codes + at, code.to(tl.int8), mask=channel < V)
    tl.store(scale + row * 32 + token, step.to(tl.float16))


@triton.jit
def quantise_value_groups_kernel(
    values, codes, scale, minimum, V: tl.constexpr, BLOCK_V: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, 32)[:, None, None]
    group = tl.arange(0, BLOCK_V // 32)[None, :, None]
    channel = group * 32 + tl.arange(0, 32)[None, None, :]
    inside = (channel < V) & (token >= 0)
    v = tl.load(values + (row * 32 + token) * V + channel, mask=inside, other=0).to(tl.float32)
    least = half(tl.min(tl.where(inside, v, float("inf")), axis=2, keep_dims=True))
    most = tl.max(tl.where(inside, v, float("-inf")), axis=2, keep_dims=True)
    used = group * 32 < V
    least = tl.where(used, least, 0.0)
    spread = tl.where(used, most - least, 0.0)
    step = tl.div_rn(spread, tl.full([32, BLOCK_V // 32, 1], 15.0, tl.float32))
    step = half(tl.maximum(step, 9.5367431640625e-07))
    wanted = tl.div_rn(v - least, tl.zeros([32, BLOCK_V // 32, 32], tl.float32) + step)
    code = rounded(tl.minimum(tl.maximum(wanted, -1.0), 16.0))
    code = tl.minimum(tl.maximum(code, 0.0), 15.0).to(tl.int32)
    pairs = tl.reshape(code, (32, BLOCK_V // 2, 2))
    packed = tl.sum(pairs << (tl.arange(0, 2)[None, None, :] * 4), axis=2)
    pair = tl.arange(0, BLOCK_V // 2)[None, :]
    flat = row * 32 + tl.arange(0, 32)[:, None]
    tl.store(codes + flat * (V // 2) + pair, packed.to(tl.uint8), mask=pair < V // 2)
    at = (row * 32 + token) * ((V + 31) // 32) + group
    tl.store(scale + at, step.to(tl.float16), mask=used & (token >= 0))
    tl.store(minimum + at, least.to(tl.float16), mask=used & (token >= 0))


def quantise_keys_triton(k: Tensor, profile: Profile, check: bool) -> WarmKeys:
    """See ``quantise_keys``."""
    blocks, groups, _, size = k.shape
    top, mid, low = (
        torch.empty(blocks, groups, n, BLOCK, dtype=torch.uint8, device=k.device)
        for n in (size // 4, size // 4, size // 2)
    )
    minimum, scale = (
        torch.empty(blocks, groups, size, dtype=torch.float16, device=k.device) for _ in range(2)
    )
    launch(
        "kv_quantise_keys",
        quantise_keys_kernel,
        (blocks * groups,),
        k.contiguous(),
        top,
        mid,
        low,
        minimum,
        scale,
        D=size,
        BLOCK_D=padded(size),
        LITERAL=profile == "literal",
    )
    if check:
        _check("keys", k, minimum, scale)
    return WarmKeys(top, mid, low, minimum, scale)


def quantise_values_triton(v: Tensor, profile: Profile, check: bool) -> WarmValues:
    """See ``quantise_values``."""
    blocks, groups, _, size = v.shape
    rows = blocks * groups
    kind: dict[str, Any] = {"device": v.device}
    if profile == "k8v4":
        codes = torch.empty(blocks, groups, BLOCK, size // 2, dtype=torch.uint8, **kind)
        shape = (blocks, groups, BLOCK, -(-size // 32))
        scale, minimum = (torch.empty(shape, dtype=torch.float16, **kind) for _ in range(2))
        launch(
            "kv_quantise_values",
            quantise_value_groups_kernel,
            (rows,),
            v.contiguous(),
            codes,
            scale,
            minimum,
            V=size,
            BLOCK_V=padded(size, 32),
        )
        if check:
            _check("values", v, scale, minimum)
        return WarmValues(codes, scale, minimum)
    codes = torch.empty(v.shape, dtype=torch.int8, **kind)
    scale = torch.empty(v.shape[:3], dtype=torch.float16, **kind)
    launch(
        "kv_quantise_values",
        quantise_values_kernel,
        (rows,),
        v.contiguous(),
        codes,
        scale,
        V=size,
        BLOCK_V=padded(size),
        LITERAL=profile == "literal",
    )
    if check:
        _check("values", v, scale)
    return WarmValues(codes, scale)


def _check(what: str, x: Tensor, *halves: Tensor) -> None:
    if not torch.isfinite(x).all():
        raise QuantiseError(
            f"{what} hold NaN or infinity, which no code stands for; the weights or the input that "
            "made them are broken"
        )
    if not all(bool(torch.isfinite(half).all()) for half in halves):
        raise QuantiseError(
            f"{what} as large as {float(x.abs().max()):.3g} need a scale or minimum beyond fp16; "
            "keep this context in profile 'full'"
        )
