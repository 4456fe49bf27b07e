"""Dr. GRPO (arXiv 2503.20783): GRPO without its two biases.

L = -(1/(B L)) sum_j sum_i min(r_ij A_j, clip(r_ij) A_j) with a constant L (``max_tokens``) in place
of |y_j|, so that length does not change a token's weight. Use it with rounds.advantage =
"group_mean": the paper drops the division by the group's standard deviation too.
"""

from __future__ import annotations

from torch import Tensor

from parl.learner.config import LossConfig
from parl.learner.losses.clipped import clipped_gain
from parl.learner.losses.tokens import LossTokens


def dr_grpo(tokens: LossTokens, config: LossConfig) -> tuple[Tensor, Tensor]:
    gain, cut = clipped_gain(tokens.logprobs - tokens.old_logprobs, tokens.gain, config)
    return -gain.sum() / (tokens.num_sequences * config.max_tokens), cut.sum()
