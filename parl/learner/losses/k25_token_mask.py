"""Kimi K2.5 report 4.4.2: token-masked policy gradient with a symmetric log-ratio pull.

L = -(1/N) sum_i [ m_i r_i A_i - tau (log r_i)^2 ], r = pi/pi_old, m_i = 1 where
ratio_low <= r_i <= ratio_high, whatever the sign of A (unlike PPO). The pull acts on every token.
The report prints the objective to maximise; this is its negative (facts 4.1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parl.learner.config import LossConfig
from parl.learner.losses.tokens import LossTokens


def k25_token_mask(tokens: LossTokens, config: LossConfig) -> tuple[Tensor, Tensor]:
    log_ratio = tokens.logprobs - tokens.old_logprobs
    with torch.no_grad():
        inside = (log_ratio >= math.log(config.ratio_low)) & (
            log_ratio <= math.log(config.ratio_high)
        )
    # masked before exp: a huge ratio outside the window must not become inf * 0
    ratio = torch.where(inside, log_ratio, torch.zeros_like(log_ratio)).exp()
    gain = torch.where(inside, ratio * tokens.gain, torch.zeros_like(ratio))
    loss = (config.tau * log_ratio.square() - gain).sum() / tokens.num_tokens
    return loss, (~inside).sum()
