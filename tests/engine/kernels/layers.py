"""Tiered layers of random numbers, poisoned where nobody may look, and attention in fp64."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from engine.kernels.tiered import ABSENT, FULL, WARM, TieredLayer
from engine.kvcache.quantise import (
    BLOCK,
    Profile,
    WarmKeys,
    WarmValues,
    quantise_keys,
    quantise_values,
)
from tests.engine.kernels.parity import numbers


@dataclass(frozen=True)
class Shape:
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    latent: bool = False


SMALL = Shape(heads=4, groups=2, key_dim=20, value_dim=12)


def make_layer(
    shape: Shape, lengths: list[int], tiers: list[str], profile: Profile = "k8v8"
) -> TieredLayer:
    """One letter a block of each context: F full, W warm, - absent. Slots are shuffled; slots that
    nobody owns and tokens past a context's length are NaN, warm ones have NaN scales."""
    width = max((len(row) for row in tiers), default=0)
    table = torch.full((len(lengths), width), 10**6, dtype=torch.int32)
    kinds = torch.full((len(lengths), width), ABSENT, dtype=torch.int8)
    counts = {"F": 0, "W": 0}
    for n, row in enumerate(tiers):
        for j, letter in enumerate(row):
            if letter in counts:
                kinds[n, j] = FULL if letter == "F" else WARM
                # slot 0 of each pool belongs to nobody
                counts[letter] += 1
                table[n, j] = counts[letter]
    groups, dim, value_dim = shape.groups, shape.key_dim, shape.value_dim
    full_k = numbers(counts["F"] + 1, groups, BLOCK, dim, seed=1)
    full_v = numbers(counts["F"] + 1, groups, BLOCK, value_dim, seed=2)
    warm = counts["W"] + 1
    keys = quantise_keys(numbers(warm, groups, BLOCK, dim, seed=3) + 2, profile)
    values = quantise_values(numbers(warm, groups, BLOCK, value_dim, seed=4), profile)
    # a cache's pools have no gaps and are no expanded views
    keys = WarmKeys(*(getattr(keys, f.name).contiguous() for f in fields(keys)))
    values = WarmValues(
        values.codes.contiguous(),
        values.scale.contiguous(),
        None if values.minimum is None else values.minimum.contiguous(),
    )
    for poisoned in (full_k, full_v, keys.scale, values.scale):
        poisoned[0] = torch.nan
    for n, (length, row) in enumerate(zip(lengths, tiers, strict=True)):
        if length % BLOCK and row[length // BLOCK] == "F":
            slot = table[n, length // BLOCK]
            full_k[slot, :, length % BLOCK :] = torch.nan
            full_v[slot, :, length % BLOCK :] = torch.nan
    if shape.latent:
        return TieredLayer(full_k, None, keys, None, table, kinds)
    return TieredLayer(full_k, full_v, keys, values, table, kinds)


def exact_attention(
    q: Tensor, layer: TieredLayer, seen: list[list[list[int]]], scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    """fp64 attention of q [N, A, D] to seen[n][a], positions that may repeat."""
    out = torch.zeros(*q.shape[:2], value_dim, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    share = q.shape[1] // layer.groups
    for n in range(len(q)):
        blocks = torch.arange(layer.table.shape[1])
        blocks = blocks[layer.tiers[n] != ABSENT]
        place = {int(block): i for i, block in enumerate(blocks)}
        k = layer.key_blocks(n, blocks).double()
        v = layer.value_blocks(n, blocks, value_dim).double()
        for a in range(q.shape[1]):
            at = [(place[p // BLOCK], p % BLOCK) for p in seen[n][a] if p // BLOCK in place]
            if not at:
                continue
            i, token = (torch.tensor(x) for x in zip(*at, strict=True))
            logits = scale * (k[i, a // share, token] @ q[n, a].double())
            lse[n, a] = logits.logsumexp(0)
            out[n, a] = (logits - lse[n, a]).exp() @ v[i, a // share, token]
    return out, lse
