"""Random contexts for the attention benches: as torch keeps them, and in tiers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.topology import warm_end
from engine.attention.view import LayerView, WarmBlocks, dense_keys, dense_values
from engine.kvcache.quantise import (
    BLOCK,
    WarmKeys,
    WarmValues,
    quantise_keys,
    quantise_values,
)

HOT = 2048


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int = 32
    groups: int = 8
    dim: int = 128


@dataclass(frozen=True, slots=True)
class Context:
    """q fp32 [A, D], scaled; k, v bf16 [G, N, D]; the same context in tiers."""

    q: Tensor
    k: Tensor
    v: Tensor
    view: LayerView


def make(shape: Shape, length: int) -> Context:
    """Noise around channel means; coded piece by piece, as fp32 would take several GiB."""
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(shape.heads, shape.dim, generator=generator) * shape.dim**-0.5
    centre = torch.randn(shape.groups, 1, shape.dim, generator=generator)
    size = (shape.groups, length, shape.dim)
    k, v = torch.empty(size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.bfloat16)
    for begin in range(0, length, 4096):
        here = slice(begin, begin + 4096)
        noise = (shape.groups, min(4096, length - begin), shape.dim)
        k[:, here] = torch.randn(noise, generator=generator) + centre
        v[:, here] = torch.randn(noise, generator=generator)
    return Context(q, k, v, _view(k, v))


def _view(k: Tensor, v: Tensor) -> LayerView:
    length = k.shape[1]
    end = warm_end(length, HOT)
    keys, values = [], []
    for begin in range(BLOCK, end, 4096):
        here = slice(begin, min(end, begin + 4096))
        keys.append(dense_keys(quantise_keys(_blocks(k[:, here]))))
        values.append(dense_values(quantise_values(_blocks(v[:, here]))))
    warm = None
    if keys:
        slots = torch.arange(end // BLOCK - 1)
        warm = WarmBlocks(
            WarmKeys(*(_joined(keys, name) for name in WarmKeys.__slots__)),
            WarmValues(_joined(values, "codes"), _joined(values, "scale")),
            slots + 1,
            slots,
        )
    return LayerView(length, k[:, :BLOCK], v[:, :BLOCK], k[:, end:], v[:, end:], warm)


def _blocks(x: Tensor) -> Tensor:
    return x.float().unflatten(1, (-1, BLOCK)).transpose(0, 1)


def _joined(parts: list, name: str) -> Tensor:
    return torch.cat([getattr(part, name) for part in parts])
