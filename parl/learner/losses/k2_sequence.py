"""Kimi K1.5 / K2: squared error of a sequence's log-ratio against its advantage.

L = (1/B) sum_j (A_j - tau log(pi(y_j) / pi_old(y_j)))^2 (K1.5, arXiv 2501.12599, eq. 3; K2 report
3.2.3), whose gradient is that of a policy gradient with baseline and a pull to the old policy. The
minimum is where log r = A / tau, so tau must be above 0; nothing is masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parl.learner.config import LossConfig
from parl.learner.losses.tokens import LossTokens


def k2_sequence(tokens: LossTokens, config: LossConfig) -> tuple[Tensor, Tensor]:
    assert config.tau > 0, "checked by LossConfig"
    log_ratios, counts = tokens.per_sequence(tokens.logprobs - tokens.old_logprobs)
    gains, _ = tokens.per_sequence(tokens.gain)
    loss = (gains / counts - config.tau * log_ratios).square().sum() / tokens.num_sequences
    return loss, torch.zeros((), dtype=torch.long)
