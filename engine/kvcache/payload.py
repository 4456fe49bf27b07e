"""Codes of whole blocks as bytes: what cold records hold and what a step reports of its cache.

A payload is uint8 [n, layout.warm_block_bytes], layer after layer: of keys the planes top, mid and
low, then fp16 minimum and scale; of values (none when latent) the codes, then fp16 scale and in
k8v4 minimum; each [G, ...] as in quantise.py, one number for expanded scales in literal. A token
takes, with G heads, keys of D and values of V numbers in L layers,

    L G (D + D / 8 + V + 2) bytes in k8v8        (warm_block_bytes / 32)

without V + 2 when latent.

Shapes: n blocks, G key-value heads, D key size, V value size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.kvcache.layout import CacheLayout
from engine.kvcache.quantise import BLOCK, VALUE_GROUP, WarmKeys, WarmValues

LayerCodes = tuple[WarmKeys, WarmValues | None]
_Piece = tuple[tuple[int, ...], torch.dtype]


def layer_codes(payload: Tensor, layout: CacheLayout, layer: int) -> LayerCodes:
    """One layer of uint8 [n, warm_block_bytes]; what WarmPool.read gave, to the bit."""
    size = layout.warm_block_bytes // layout.num_layers
    parts = _split(payload[:, layer * size : (layer + 1) * size], list(_pieces(layout)))
    top, mid, low, minimum, scale, *rest = parts
    wide = (len(payload), layout.heads, layout.key_dim)
    keys = WarmKeys(top, mid, low, minimum.expand(wide), scale.expand(wide))
    if layout.latent:
        return keys, None
    if layout.profile == "k8v4":
        return keys, WarmValues(*rest)
    codes, scale = rest
    return keys, WarmValues(codes, scale.expand(len(payload), layout.heads, BLOCK))


def _pieces(layout: CacheLayout) -> Iterator[_Piece]:
    """Of one layer and block, in order; as WarmPool allocates them."""
    heads, d, v = layout.heads, layout.key_dim, layout.value_dim
    literal = layout.profile == "literal"
    for channels in (d // 4, d // 4, d // 2):
        yield (heads, channels, BLOCK), torch.uint8
    for _ in ("minimum", "scale"):
        yield (heads, 1 if literal else d), torch.float16
    if layout.latent:
        return
    if layout.profile == "k8v4":
        yield (heads, BLOCK, v // 2), torch.uint8
        for _ in ("scale", "minimum"):
            yield (heads, BLOCK, -(-v // VALUE_GROUP)), torch.float16
    else:
        yield (heads, BLOCK, v), torch.int8
        yield (heads, 1 if literal else BLOCK), torch.float16


def _split(data: Tensor, pieces: list[_Piece]) -> list[Tensor]:
    """uint8 [n, bytes] -> [n, *shape] each."""
    found, start = [], 0
    for shape, dtype in pieces:
        end = start + math.prod(shape) * dtype.itemsize
        found.append(data[:, start:end].contiguous().view(dtype).view(len(data), *shape))
        start = end
    assert start == data.shape[1], f"a layer of {data.shape[1]} bytes, its parts take {start}"
    return found
