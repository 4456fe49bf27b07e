"""8-bit (and 4-bit) codes of cached keys and values: the torch reference, pure functions.

Shapes: B blocks of 32 tokens, G key-value heads, D key size (a multiple of 4), V value size (even).

Keys get a minimum and a scale per channel and block, because their channels have large means;
values a scale per token and head (facts/kv-attention.md 1.2: the best of 11 schemes). Scales and
minima are rounded to fp16 first and codes are made against what was stored, so dequantising has no
hidden error: |k' - k| <= scale / 2, or half an fp16 step of the minimum, or what the fp16 rounding
of a scale cuts off the top code, whichever is largest. Rounding is to nearest, ties to even, after
an fp32 division. Codes carry no gradient; ``fake_quantise`` does.

Key codes lie in bit planes. The top two bits alone are the index that retrieval scans
(facts 2.2), so it costs no memory.

Latent attention (MLA) caches one head of [latent | rotated key], whose latent is also the value.
Only keys are coded there; the value is ``dequantise_keys(...)[..., :rank]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from engine.errors import QuantiseError
from engine.kvcache.config import BLOCK as BLOCK

SCALE_FLOOR = 2.0**-20
"""Smallest scale: constant and zero channels divide by it and get code 0. An exact fp16 number."""
FP16_MAX = 65504.0
VALUE_GROUP = 32
"""Channels that share a scale and a minimum in k8v4."""

Profile = Literal["k8v8", "k8v4", "literal", "full"]
"""k8v8: as above. k8v4: values in 4 bits, asymmetric per token and 32 channels. literal: one
symmetric scale per block and head, for keys and for values; what the seed's wording says, 30 times
worse in KL. full: nothing is coded."""


@dataclass(frozen=True, slots=True)
class WarmKeys:
    """k ~ minimum + scale * code, code 0 .. 255 = top << 6 | mid << 4 | low.

    top, mid: uint8 [B, G, D/4, 32], channel 4q + i in bits 2i and 2i + 1; low: uint8
    [B, G, D/2, 32], channel 2p in the low nibble, 2p + 1 in the high; minimum, scale: fp16
    [B, G, D], an expanded [B, G, 1] in the literal profile.
    """

    top: Tensor
    mid: Tensor
    low: Tensor
    minimum: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class WarmValues:
    """v ~ scale * code with codes int8 [B, G, 32, V], scale fp16 [B, G, 32] and minimum None.

    k8v4: v ~ minimum + scale * code, codes uint8 [B, G, 32, V/2] (channel 2p in the low nibble),
    scale, minimum fp16 [B, G, 32, ceil(V/32)].
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None


def quantise_keys(k: Tensor, profile: Profile = "k8v8") -> WarmKeys:
    """k [B, G, 32, D]. QuantiseError when a number is not finite or too large for fp16."""
    k = _checked(k, "keys", 4, profile)
    if profile == "literal":
        scale = _scale(k.abs().amax(dim=(2, 3), keepdim=True)[:, :, 0] / 127, "keys")
        minimum = _half(-128 * scale.float(), "keys")
    else:
        low, high = k.amin(dim=2), k.amax(dim=2)
        minimum = _half(low, "keys")
        scale = _scale((high - minimum.float()) / 255, "keys")
    shape = (*k.shape[:2], k.shape[3])
    minimum, scale = minimum.expand(shape), scale.expand(shape)
    offset = k - minimum.float()[:, :, None]
    codes = _round(offset / scale.float()[:, :, None], 0, 255).to(torch.uint8)
    return pack_key_codes(codes, minimum, scale)


def pack_key_codes(codes: Tensor, minimum: Tensor, scale: Tensor) -> WarmKeys:
    """Planes of codes uint8 [B, G, 32, D]."""
    by_channel = codes.transpose(2, 3)
    return WarmKeys(
        top=_pack_quads(by_channel >> 6),
        mid=_pack_quads((by_channel >> 4) & 3),
        low=_pack_pairs(by_channel & 15, dim=2),
        minimum=minimum,
        scale=scale,
    )


def key_codes(keys: WarmKeys) -> Tensor:
    """The planes put together again: uint8 [B, G, 32, D]."""
    top, mid = _unpack_quads(keys.top), _unpack_quads(keys.mid)
    low = _unpack_pairs(keys.low, dim=2)
    return ((top << 6) | (mid << 4) | low).transpose(2, 3).contiguous()


def dequantise_keys(keys: WarmKeys) -> Tensor:
    """fp32 [B, G, 32, D]."""
    codes = key_codes(keys).float()
    return keys.minimum.float()[:, :, None] + keys.scale.float()[:, :, None] * codes


def quantise_values(v: Tensor, profile: Profile = "k8v8") -> WarmValues:
    """v [B, G, 32, V]. QuantiseError when a number is not finite or too large for fp16."""
    v = _checked(v, "values", 2, profile)
    if profile == "k8v4":
        return _quantise_value_groups(v)
    dims = (2, 3) if profile == "literal" else (3,)
    scale = _scale(v.abs().amax(dim=dims, keepdim=True)[..., 0] / 127, "values")
    scale = scale.expand(v.shape[:3])
    codes = _round(v / scale.float()[..., None], -127, 127).to(torch.int8)
    return WarmValues(codes, scale)


def dequantise_values(values: WarmValues) -> Tensor:
    """fp32 [B, G, 32, V]."""
    if values.minimum is None:
        return values.scale.float()[..., None] * values.codes.float()
    codes = _unpack_pairs(values.codes, dim=3).float()
    scale = _spread(values.scale.float(), codes.shape[3])
    return _spread(values.minimum.float(), codes.shape[3]) + scale * codes


def value_codes(values: WarmValues) -> Tensor:
    """int8 [B, G, 32, V], or uint8 0 .. 15 in k8v4."""
    return values.codes if values.minimum is None else _unpack_pairs(values.codes, dim=3)


def fake_quantise(k: Tensor, v: Tensor, profile: Profile) -> tuple[Tensor, Tensor]:
    """What the cache would give back for k [B, G, 32, D], v [B, G, 32, V]; gradients pass through
    unchanged (straight-through estimator)."""
    return fake_quantise_keys(k, profile), fake_quantise_values(v, profile)


def fake_quantise_keys(k: Tensor, profile: Profile) -> Tensor:
    """Bit-equal to ``dequantise_keys(quantise_keys(k))`` in k's type, with k's gradient."""
    if profile == "full":
        return k
    return read_as(k, dequantise_keys(quantise_keys(k, profile)))


def fake_quantise_values(v: Tensor, profile: Profile) -> Tensor:
    """Bit-equal to ``dequantise_values(quantise_values(v))`` in v's type, with v's gradient."""
    if profile == "full":
        return v
    return read_as(v, dequantise_values(quantise_values(v, profile)))


class _StraightThrough(torch.autograd.Function):
    """x + (y - x).detach() would not be y to the last bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0], None


def read_as(x: Tensor, y: Tensor) -> Tensor:
    """y in x's type, with x's gradient unchanged (straight-through)."""
    result = _StraightThrough.apply(x, y.to(x.dtype))
    assert isinstance(result, Tensor), "apply returns what forward returned"
    return result


def _quantise_value_groups(v: Tensor) -> WarmValues:
    size = v.shape[3]
    # a short last group repeats the last channel, which changes neither its minimum nor maximum
    padding = v[..., -1:].expand(*v.shape[:3], -size % VALUE_GROUP)
    groups = torch.cat([v, padding], dim=3).unflatten(3, (-1, VALUE_GROUP))
    minimum = _half(groups.amin(dim=4), "values")
    scale = _scale((groups.amax(dim=4) - minimum.float()) / 15, "values")
    offset = v - _spread(minimum.float(), size)
    codes = _round(offset / _spread(scale.float(), size), 0, 15).to(torch.uint8)
    return WarmValues(_pack_pairs(codes, dim=3), scale, minimum)


def _spread(per_group: Tensor, size: int) -> Tensor:
    return per_group.repeat_interleave(VALUE_GROUP, dim=3)[..., :size]


def _checked(x: Tensor, what: str, multiple: int, profile: Profile) -> Tensor:
    if profile == "full":
        raise QuantiseError(f"profile 'full' does not code {what}; keep them as they are")
    if x.ndim != 4 or x.shape[2] != BLOCK or x.shape[3] % multiple or not x.shape[3]:
        raise QuantiseError(
            f"{what} of shape {tuple(x.shape)} cannot be coded; expected [blocks, heads, {BLOCK}, "
            f"size] with a size that is a multiple of {multiple}"
        )
    x = x.detach().float()
    if not torch.isfinite(x).all():
        raise QuantiseError(
            f"{what} hold NaN or infinity, which no code stands for; the weights or the input that "
            "made them are broken"
        )
    return x


def _half(x: Tensor, what: str) -> Tensor:
    half = x.half()
    if not torch.isfinite(half).all():
        largest = float(x.abs().max())
        raise QuantiseError(
            f"{what} need a scale or minimum of {largest:.3g}, more than the {FP16_MAX:g} of fp16; "
            "keep this context in profile 'full'"
        )
    return half


def _scale(x: Tensor, what: str) -> Tensor:
    return _half(x.clamp(min=SCALE_FLOOR), what)


def _round(x: Tensor, low: int, high: int) -> Tensor:
    return torch.round(x).clamp_(low, high)


def _pack_quads(codes: Tensor) -> Tensor:
    """uint8 0 .. 3 [B, G, D, 32] -> [B, G, D/4, 32]"""
    a, b, c, d = codes.unflatten(2, (-1, 4)).unbind(3)
    return a | (b << 2) | (c << 4) | (d << 6)


def _unpack_quads(packed: Tensor) -> Tensor:
    parts = [(packed >> shift) & 3 for shift in (0, 2, 4, 6)]
    return torch.stack(parts, dim=3).flatten(2, 3)


def _pack_pairs(codes: Tensor, dim: int) -> Tensor:
    low, high = codes.unflatten(dim, (-1, 2)).unbind(dim + 1)
    return low | (high << 4)


def _unpack_pairs(packed: Tensor, dim: int) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=dim + 1).flatten(dim, dim + 1)
