"""CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): clip the weight, never the token.

L = -(1/N) sum_i sg(clip(r_i, ratio_low, ratio_high)) A_i log pi_i. Rare tokens that a clipped
surrogate drops ("However", "Wait") keep a gradient; nothing is cut off, so 0 is counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parl.learner.config import LossConfig
from parl.learner.losses.tokens import LossTokens


def cispo(tokens: LossTokens, config: LossConfig) -> tuple[Tensor, Tensor]:
    ratio = (tokens.logprobs - tokens.old_logprobs).detach().exp()
    weight = ratio.clamp(config.ratio_low, config.ratio_high) * tokens.gain
    return -(weight * tokens.logprobs).sum() / tokens.num_tokens, torch.zeros((), dtype=torch.long)
