"""Rotary position embedding, plain and YaRN (facts 1.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.model.config import ModelConfig, YarnConfig

_ROWS = 65536


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of N rows, fp32 [N, 1, D/2]."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, H, D] -> rotated. Interleaved pairs come out in halves: scores do not see it."""
        if self.interleaved:
            first, second = x[..., 0::2], x[..., 1::2]
        else:
            first, second = x.chunk(2, dim=-1)
        cos, sin = self.cos, self.sin
        turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
        return turned.to(x.dtype)

    def to(self, device: torch.device) -> Rotation:
        return Rotation(self.cos.to(device), self.sin.to(device), self.interleaved)


class RotaryTable(nn.Module):
    """cos and sin for every position up to ``max_position_embeddings``; fp32 [P, D/2].

    A table instead of a call keeps the bits of a position the same in every batch.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config = config
        self.interleaved = config.rope_interleave
        for name, table in zip(("cos", "sin"), self._tables(), strict=True):
            self.register_buffer(name, table, persistent=False)

    def _tables(self) -> tuple[Tensor, Tensor]:
        config = self._config
        inverse, scale = inverse_frequencies(config), cos_scale(config.rope_scaling)
        length = config.max_position_embeddings
        parts: list[tuple[Tensor, Tensor]] = []
        # in parts, because float64 takes several times the memory of the tables
        for start in range(0, length, _ROWS):
            end = min(start + _ROWS, length)
            angle = torch.arange(start, end, dtype=torch.float64)[:, None] * inverse
            cos, sin = angle.cos(), angle.sin()
            if scale != 1.0:
                cos, sin = cos * scale, sin * scale
            parts.append((cos.float(), sin.float()))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([cos for cos, _ in parts]), torch.cat([sin for _, sin in parts])

    def materialise(self, device: torch.device | str | int) -> None:
        """Compute the tables on ``device``: a model built on the meta device has only shapes."""
        cos, sin = self._tables()
        self.cos, self.sin = cos.to(device), sin.to(device)

    def forward(self, positions: Tensor) -> Rotation:
        """positions int64 [N]."""
        return Rotation(
            self.cos[positions][:, None], self.sin[positions][:, None], self.interleaved
        )


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """float64 [D/2]. YaRN divides the slow ones by ``factor``, keeps the fast ones, and blends
    between the dimensions that turn beta_fast and beta_slow times over the original context."""
    dim, theta, yarn = config.rotary_dim, config.rope_theta, config.rope_scaling
    plain = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if yarn is None:
        return plain

    def dimension_of(turns: float) -> float:
        length = yarn.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension_of(yarn.beta_slow)), dim - 1)
    width = high - low or 0.001  # a step where both betas fall on one dimension
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def cos_scale(yarn: YarnConfig | None) -> float:
    """Factor of cos and sin: 1 for the released models, whose two mscales are equal."""
    if yarn is None:
        return 1.0
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_scale(yarn.factor, yarn.mscale) / yarn_scale(yarn.factor, yarn.mscale_all_dim)
    return yarn_scale(yarn.factor, 1.0)


def softmax_scale(config: ModelConfig) -> float:
    """Factor of q . k. Under mla YaRN multiplies 1/sqrt(D) by m^2, m = 0.1 mscale ln(factor) + 1;
    without it K2's logits would be half as large."""
    scale = config.qk_head_dim**-0.5
    yarn = config.rope_scaling
    if config.is_mla and yarn is not None and yarn.mscale_all_dim:
        scale *= yarn_scale(yarn.factor, yarn.mscale_all_dim) ** 2
    return scale
