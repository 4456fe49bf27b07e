"""Ridge regression of summary adapters onto what full attention makes of a block.

For a query the ideal summary of a block has the logit log sum exp(q.k) - log n of its n keys and,
as its value, the block's own softmax average. Captured queries give the key that comes nearest, by
least squares weighted with the attention that the block really gets; then one linear map a layer
and head learns to give it from the adapter's features (facts/kv-attention.md 3).

Shapes: n queries, G key-value heads, P query heads per key-value head, D key size, V value size,
T tokens, J blocks after the sink, N = blocks of all documents, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.summary import Summaries, means_of
from engine.attention.summary_adapters import AnchorAdapters, MeanAdapters
from engine.kvcache.quantise import BLOCK

STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1000.0)
"""Ridge penalties that are tried, as shares of the features' own second moment times N."""
_OWN = 0.1
"""Penalty on a block's key for leaving its mean, as a share of the queries' mean energy."""


@dataclass(frozen=True, slots=True)
class Captured:
    """One layer of one document: q [n, G, P, D], scaled, at positions int64 [n]; k [G, T, D],
    v [G, T, V]. Blocks that end before a query's ``window`` are its far ones."""

    q: Tensor
    positions: Tensor
    k: Tensor
    v: Tensor
    window: int


@dataclass(frozen=True, slots=True)
class Targets:
    """One layer of one document. means: of J blocks; keys [G, J, D], values [G, J, V]: what they
    should be; mass [G, P, n, J]: attention a block really gets, 0 where it is not far; logits
    [G, P, n, J]: what q.key should give."""

    means: Summaries
    keys: Tensor
    values: Tensor
    mass: Tensor
    logits: Tensor
    q: Tensor

    @property
    def weight(self) -> Tensor:
        """Attention a block gets in all: [G, J]."""
        return self.mass.sum(dim=(1, 2))

    def gate(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """What is left of the logits over q.key, its sum by mass, and the mass: [G, P] each."""
        rest = self.logits - torch.einsum("ngpd,gjd->gpnj", self.q, keys)
        return (self.mass * rest).sum(dim=(2, 3)), self.mass.sum(dim=(2, 3))


def targets(captured: Captured) -> Targets:
    """What each far block's summary should be for these queries."""
    q, k, v = captured.q, captured.k, captured.v
    num_blocks = int(captured.positions.max() + 1 - captured.window) // BLOCK
    blocks = torch.arange(1, num_blocks)
    far = slice(BLOCK, num_blocks * BLOCK)
    means = means_of(k[:, far], v[:, far], blocks)
    scores = torch.einsum("ngpd,gtd->gpnt", q, k)
    hidden = torch.arange(k.shape[1]) > captured.positions[:, None]
    total = scores.masked_fill(hidden, -torch.inf).logsumexp(dim=-1)
    inside = scores[..., far].unflatten(-1, (-1, BLOCK))
    lse = inside.logsumexp(dim=-1)
    late = BLOCK * (blocks + 1) > (captured.positions[:, None] + 1 - captured.window)
    mass = (lse - total[..., None]).exp().masked_fill(late, 0.0)
    logits = lse - math.log(BLOCK)
    within = (inside - lse[..., None]).exp()
    read = torch.einsum("gpnj,gpnjt->gjt", mass, within)
    tokens = v[:, far].unflatten(1, (-1, BLOCK))
    weight = mass.sum(dim=(1, 2))
    values = torch.einsum("gjt,gjtv->gjv", read, tokens) / weight[..., None].clamp(min=1e-9)
    values = torch.where(weight[..., None] > 1e-6, values, means.values)
    keys = means.keys + _nearest(q, means.keys, logits, mass)
    return Targets(means, keys, values, mass, logits, q)


def _nearest(q: Tensor, keys: Tensor, logits: Tensor, mass: Tensor) -> Tensor:
    """What to add to each block's mean key: [G, J, D]."""
    rest = logits - torch.einsum("ngpd,gjd->gpnj", q, keys)
    shared = (mass * rest).sum(dim=(2, 3)) / mass.sum(dim=(2, 3)).clamp(min=1e-9)
    rest = rest - shared[:, :, None, None]
    energy = torch.einsum("gpnj,ngpd,ngpe->gjde", mass, q, q)
    right = torch.einsum("gpnj,gpnj,ngpd->gjd", mass, rest, q)
    dim = q.shape[-1]
    own = energy.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp(min=1e-6)
    penalty = _OWN * own[..., None, None] * torch.eye(dim)
    return torch.linalg.solve(energy + penalty, right[..., None])[..., 0]


def fit_means(adapters: MeanAdapters, layer: int, found: Sequence[Targets]) -> None:
    """Set one layer from its documents; the last one chooses the penalty."""
    raw = [adapters.raw_features(one.means) for one in found]
    together = torch.cat(raw, dim=1)
    adapters.offset.data[layer] = together.mean(dim=1)
    adapters.spread.data[layer] = together.std(dim=1).clamp(min=1e-3)
    x = [adapters.features(layer, one.means) for one in found]
    key = [adapters.turn.back(one.keys - one.means.keys, one.means.blocks) for one in found]
    value = [one.values - one.means.values for one in found]
    _set(adapters, layer, x, key, value, [one.weight for one in found])
    _set_gate(adapters, layer, found, lambda i: adapters.summarise(layer, found[i].means).keys)


def fit_anchor(
    adapters: AnchorAdapters, layer: int, found: Sequence[Targets], vectors: Sequence[Tensor]
) -> None:
    """The same from each document's encoder vectors [blocks, E], sink's first; the trunk stays."""
    groups = adapters.geometry.groups
    x = [
        adapters.hidden(v[one.means.blocks]).expand(groups, -1, -1)
        for one, v in zip(found, vectors, strict=True)
    ]
    key = [adapters.turn.back(one.keys, one.means.blocks) for one in found]
    _set(adapters, layer, x, key, [one.values for one in found], [one.weight for one in found])

    def keys(i: int) -> Tensor:
        blocks = found[i].means.blocks
        return adapters.summarise(layer, vectors[i][blocks], blocks).keys

    _set_gate(adapters, layer, found, keys)


def _set(
    adapters: MeanAdapters | AnchorAdapters,
    layer: int,
    x: list[Tensor],
    key: list[Tensor],
    value: list[Tensor],
    weight: list[Tensor],
) -> None:
    """Maps and biases of one layer by weighted ridge regression."""
    y = [torch.cat(pair, dim=-1) for pair in zip(key, value, strict=True)]
    size = key[0].shape[-1]
    if len(x) > 1:
        errors = [
            _error(_ridge(x[:-1], y[:-1], weight[:-1], s), x[-1], y[-1], weight[-1])
            for s in STRENGTHS
        ]
        best = STRENGTHS[errors.index(min(errors))]
    else:
        best = STRENGTHS[-1]
    slope, bias = _ridge(x, y, weight, best)
    adapters.to_key.data[layer], adapters.to_value.data[layer] = slope.split(
        [size, slope.shape[-1] - size], dim=-1
    )
    adapters.key_bias.data[layer], adapters.value_bias.data[layer] = bias.split(
        [size, bias.shape[-1] - size], dim=-1
    )


def _ridge(
    x: Sequence[Tensor], y: Sequence[Tensor], weight: Sequence[Tensor], strength: float
) -> tuple[Tensor, Tensor]:
    """x [G, J, F], y [G, J, Y], weight [G, J], one a document -> slope [G, F, Y], bias [G, Y]."""
    xs, ys, ws = torch.cat(list(x), 1), torch.cat(list(y), 1), torch.cat(list(weight), 1)
    ws = ws.clamp(min=1e-9)
    ws = (ws / ws.sum(dim=1, keepdim=True))[..., None]
    x_mean, y_mean = (ws * xs).sum(1, keepdim=True), (ws * ys).sum(1, keepdim=True)
    xs, ys = xs - x_mean, ys - y_mean
    moment = torch.matmul((ws * xs).transpose(1, 2), xs)
    scale = moment.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp(min=1e-9)
    penalty = strength * scale[:, None, None] * torch.eye(xs.shape[-1])
    slope = torch.linalg.solve(moment + penalty, torch.matmul((ws * xs).transpose(1, 2), ys))
    return slope, (y_mean - torch.matmul(x_mean, slope))[:, 0]


def _error(fitted: tuple[Tensor, Tensor], x: Tensor, y: Tensor, weight: Tensor) -> float:
    slope, bias = fitted
    off = torch.matmul(x, slope) + bias[:, None] - y
    return float((weight[..., None] * off.square()).sum())


def _set_gate(
    adapters: MeanAdapters | AnchorAdapters,
    layer: int,
    found: Sequence[Targets],
    keys: Callable[[int], Tensor],
) -> None:
    sums = [one.gate(keys(i)) for i, one in enumerate(found)]
    total = torch.stack([rest for rest, _ in sums]).sum(dim=0)
    mass = torch.stack([part for _, part in sums]).sum(dim=0)
    adapters.gate.data[layer] = total / mass.clamp(min=1e-9)
