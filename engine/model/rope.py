"""Rotary position embedding on half-split pairs (x_i, x_{i + D/2})."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RotaryTable(nn.Module):
    """cos and sin for every position up to ``max_positions``; fp32 [P, D/2].

    A table instead of a call keeps the bits of a position the same in every batch.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, theta: float, max_positions: int) -> None:
        super().__init__()
        inverse = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = torch.arange(max_positions, dtype=torch.float64)[:, None] * inverse
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [N, H, D], positions int64 [N] -> rotated x."""
        cos = self.cos[positions][:, None]
        sin = self.sin[positions][:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
