"""PPO's clipped objective (Schulman et al. 2017, eq. 7) with separate low and high bounds.

L = -(1/N) sum_i min(r_i A_i, clip(r_i, ratio_low, ratio_high) A_i).
"""

from __future__ import annotations

import torch
from torch import Tensor

from parl.learner.config import LossConfig


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, norm: float, config: LossConfig
) -> tuple[Tensor, Tensor]:
    ratio = (logprobs - old_logprobs).exp()
    plain = ratio * advantages
    clipped = ratio.clamp(config.ratio_low, config.ratio_high) * advantages
    return -torch.minimum(plain, clipped).sum() / norm, (clipped < plain).sum()
