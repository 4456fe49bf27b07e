"""Trained summaries: maps from what is known of a block to a key and value that stand for it.

Two kinds (facts/kv-attention.md 3, "From frozen encoder to K/V"):

- ``MeanAdapters``: for each layer and key-value head a linear map of the block's mean key and mean
  value. What it adds to the means starts from ridge regression (engine.attention.summary_fit).
- ``AnchorAdapters``: the semantic-anchoring MLP, from a frozen text encoder's vector of the block.

Keys of both are made in the block's own frame and turned to its centre position, so one map serves
every position. A gate for each query head is added to its logits. Both are frozen once trained: the
engine and the learner read the same file.

Shapes: L layers, G key-value heads, P query heads per key-value head, D key size, V value size,
J blocks, F features (D + V; D in latent attention, whose values are part of its keys), E encoder
dimension, H hidden size of the MLP, T rotated channels, the last of a key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.summary import Summaries
from engine.kvcache.quantise import BLOCK


@dataclass(frozen=True, slots=True)
class Geometry:
    """What adapters must share with a model. ``frequencies``: of rotary embedding, [T / 2]."""

    num_layers: int
    groups: int
    heads: int
    key_dim: int
    value_dim: int
    latent: bool
    frequencies: tuple[float, ...]

    @property
    def features(self) -> int:
        return self.key_dim if self.latent else self.key_dim + self.value_dim


class Turn:
    """Rotation of keys by the positions of block centres; ``back`` undoes it."""

    def __init__(self, geometry: Geometry) -> None:
        self._frequencies = torch.tensor(geometry.frequencies, dtype=torch.float64)

    def __call__(self, keys: Tensor, blocks: Tensor) -> Tensor:
        """keys [..., J, D], blocks int64 [J]"""
        return self._turn(keys, blocks, 1.0)

    def back(self, keys: Tensor, blocks: Tensor) -> Tensor:
        return self._turn(keys, blocks, -1.0)

    def _turn(self, keys: Tensor, blocks: Tensor, sign: float) -> Tensor:
        centre = blocks.double() * BLOCK + (BLOCK - 1) / 2
        angle = sign * centre[:, None] * self._frequencies
        cos, sin = angle.cos().float(), angle.sin().float()
        size = 2 * len(self._frequencies)
        still, turning = keys[..., : keys.shape[-1] - size], keys[..., -size:]
        first, second = turning.chunk(2, dim=-1)
        turned = [first * cos - second * sin, first * sin + second * cos]
        return torch.cat([still, *turned], dim=-1)


class MeanAdapters(nn.Module):
    """Zero maps and gates: untrained, it gives the means back."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        layers, groups, features = geometry.num_layers, geometry.groups, geometry.features
        self.turn = Turn(geometry)
        self.offset = nn.Parameter(torch.zeros(layers, groups, features), requires_grad=False)
        """Subtracted from the features, and what they are divided by: of the fitting data."""
        self.spread = nn.Parameter(torch.ones(layers, groups, features), requires_grad=False)
        self.to_key = nn.Parameter(torch.zeros(layers, groups, features, geometry.key_dim))
        self.to_value = nn.Parameter(torch.zeros(layers, groups, features, geometry.value_dim))
        self.key_bias = nn.Parameter(torch.zeros(layers, groups, geometry.key_dim))
        self.value_bias = nn.Parameter(torch.zeros(layers, groups, geometry.value_dim))
        self.gate = nn.Parameter(torch.zeros(layers, groups, geometry.heads // groups))

    def summarise(self, layer: int, means: Summaries) -> Summaries:
        """Means of keys and values as they are read -> what stands for their blocks."""
        x = self.features(layer, means)
        key = torch.matmul(x, self.to_key[layer]) + self.key_bias[layer][:, None]
        value = torch.matmul(x, self.to_value[layer]) + self.value_bias[layer][:, None]
        return Summaries(
            means.keys + self.turn(key, means.blocks),
            means.values + value,
            means.blocks,
            self.gate[layer],
        )

    def features(self, layer: int, means: Summaries) -> Tensor:
        """[G, J, F], about 0 with a spread of 1."""
        x = self.raw_features(means)
        return (x - self.offset[layer][:, None]) / self.spread[layer][:, None]

    def raw_features(self, means: Summaries) -> Tensor:
        """The mean key seen from the block's centre, and the mean value: [G, J, F]."""
        keys = self.turn.back(means.keys, means.blocks)
        return keys if self.geometry.latent else torch.cat([keys, means.values], dim=-1)


class AnchorAdapters(nn.Module):
    """From encoder vectors [J, E]; ``encoder``: the name of who made them."""

    def __init__(self, geometry: Geometry, encoder: str, dimension: int, hidden: int) -> None:
        super().__init__()
        self.geometry, self.encoder = geometry, encoder
        layers, groups = geometry.num_layers, geometry.groups
        self.turn = Turn(geometry)
        generator = torch.Generator().manual_seed(dimension * 1009 + hidden)
        first = torch.randn(dimension, hidden, generator=generator)
        # unit vectors in, so numbers of about 1 go into the nonlinearity
        self.trunk = nn.Parameter(first)
        self.trunk_bias = nn.Parameter(torch.zeros(hidden))
        self.to_key = nn.Parameter(torch.zeros(layers, groups, hidden, geometry.key_dim))
        self.to_value = nn.Parameter(torch.zeros(layers, groups, hidden, geometry.value_dim))
        self.key_bias = nn.Parameter(torch.zeros(layers, groups, geometry.key_dim))
        self.value_bias = nn.Parameter(torch.zeros(layers, groups, geometry.value_dim))
        self.gate = nn.Parameter(torch.zeros(layers, groups, geometry.heads // groups))

    @property
    def dimension(self) -> int:
        return self.trunk.shape[0]

    def hidden(self, vectors: Tensor) -> Tensor:
        """[J, E] -> [J, H]"""
        return F.gelu(vectors @ self.trunk + self.trunk_bias)

    def summarise(self, layer: int, vectors: Tensor, blocks: Tensor) -> Summaries:
        """vectors [J, E] of the texts of blocks int64 [J]."""
        h = self.hidden(vectors)
        key = torch.matmul(h, self.to_key[layer]) + self.key_bias[layer][:, None]
        value = torch.matmul(h, self.to_value[layer]) + self.value_bias[layer][:, None]
        return Summaries(self.turn(key, blocks), value, blocks, self.gate[layer])

    def for_context(self, vectors: Tensor) -> Callable[[int, Summaries], Summaries]:
        """``summarise`` of a context whose block b has vectors[b], instead of its means."""

        def summarise(layer: int, means: Summaries) -> Summaries:
            return self.summarise(layer, vectors[means.blocks], means.blocks)

        return summarise


Adapters = MeanAdapters | AnchorAdapters
