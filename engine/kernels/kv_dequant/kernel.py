"""Numbers from codes: one program a block and head."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.launch import launch, padded
from engine.kernels.tiled import warm_keys, warm_values
from engine.kvcache.quantise import BLOCK, WarmKeys, WarmValues


@triton.jit
def dequant_keys_kernel(top, mid, low, minimum, scale, out, D: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)[:, None]
    token = tl.arange(0, 32)[None, :]
    inside = channel < D
    valid = inside & (token >= 0)
    k = warm_keys(top, mid, low, minimum, scale, row, channel, token, valid, inside, D)
    tl.store(out + (row * 32 + token) * D + channel, k, mask=valid)


@triton.jit
def dequant_values_kernel(
    codes, scale, minimum, out, V: tl.constexpr, BLOCK_V: tl.constexpr, BITS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, 32)[:, None]
    channel = tl.arange(0, BLOCK_V)[None, :]
    valid = (channel < V) & (token >= 0)
    v = warm_values(codes, scale, minimum, row, token, channel, valid, V, BITS)
    tl.store(out + (row * 32 + token) * V + channel, v, mask=valid)


def dequantise_keys_triton(keys: WarmKeys) -> Tensor:
    """See ``dequantise_keys``."""
    blocks, groups, size = keys.minimum.shape
    out = torch.empty(blocks, groups, BLOCK, size, device=keys.top.device)
    launch(
        "kv_dequant",
        dequant_keys_kernel,
        (blocks * groups,),
        keys.top.contiguous(),
        keys.mid.contiguous(),
        keys.low.contiguous(),
        keys.minimum.contiguous(),
        keys.scale.contiguous(),
        out,
        D=size,
        BLOCK_D=padded(size),
    )
    return out


def dequantise_values_triton(values: WarmValues) -> Tensor:
    """See ``dequantise_values``."""
    blocks, groups = values.codes.shape[:2]
    bits = 8 if values.minimum is None else 4
    size = values.codes.shape[3] * (8 // bits)
    out = torch.empty(blocks, groups, BLOCK, size, device=values.codes.device)
    scale = values.scale.contiguous()
    launch(
        "kv_dequant",
        dequant_values_kernel,
        (blocks * groups,),
        values.codes.contiguous(),
        scale,
        scale if values.minimum is None else values.minimum.contiguous(),
        out,
        V=size,
        BLOCK_V=padded(size),
        BITS=bits,
    )
    return out
