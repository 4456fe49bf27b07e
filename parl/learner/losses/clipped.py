"""The clipped surrogate of PPO, token by token; what ppo_clip, grpo and dr_grpo sum up."""

from __future__ import annotations

import torch
from torch import Tensor

from parl.learner.config import LossConfig


def clipped_gain(log_ratio: Tensor, gain: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, ratio_low, ratio_high) A) and where the clip bites, both [n]
    (Schulman et al. 2017, eq. 7, with separate bounds)."""
    ratio = log_ratio.exp()
    plain = ratio * gain
    clipped = ratio.clamp(config.ratio_low, config.ratio_high) * gain
    return torch.minimum(plain, clipped), clipped < plain
