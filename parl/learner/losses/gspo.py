"""GSPO (arXiv 2507.18071, eq. 5): one ratio a sequence, the geometric mean of its tokens' ratios.

L = -(1/B) sum_j min(s_j A_j, clip(s_j, ratio_low, ratio_high) A_j), s_j = exp(mean_i log r_ij). The
paper's bounds are close to 1 (1 - 3e-4, 1 + 4e-4): a mean moves far less than a token does.
"""

from __future__ import annotations

from torch import Tensor

from parl.learner.config import LossConfig
from parl.learner.losses.clipped import clipped_gain
from parl.learner.losses.tokens import LossTokens


def gspo(tokens: LossTokens, config: LossConfig) -> tuple[Tensor, Tensor]:
    log_ratios, counts = tokens.per_sequence(tokens.logprobs - tokens.old_logprobs)
    gains, _ = tokens.per_sequence(tokens.gain)
    gain, cut = clipped_gain(log_ratios / counts, gains / counts, config)
    return -gain.sum() / tokens.num_sequences, (cut * counts).sum().long()
