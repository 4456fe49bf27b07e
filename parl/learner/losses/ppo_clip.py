"""PPO's clipped objective (Schulman et al. 2017, eq. 7) with separate low and high bounds.

L = -(1/N) sum_i min(r_i A_i, clip(r_i, ratio_low, ratio_high) A_i), N = tokens of the batch (DAPO's
token mean).
"""

from __future__ import annotations

from torch import Tensor

from parl.learner.config import LossConfig
from parl.learner.losses.clipped import clipped_gain
from parl.learner.losses.tokens import LossTokens


def ppo_clip(tokens: LossTokens, config: LossConfig) -> tuple[Tensor, Tensor]:
    gain, cut = clipped_gain(tokens.logprobs - tokens.old_logprobs, tokens.gain, config)
    return -gain.sum() / tokens.num_tokens, cut.sum()
