"""GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3): PPO's clip, mean over a sequence, then over
sequences.

L = -(1/B) sum_j (1/|y_j|) sum_i min(r_ij A_j, clip(r_ij) A_j), without the KL term to a reference.
Trap: the 1/|y| makes a long wrong answer cheaper per token than a short one; dr_grpo and the token
mean of ppo_clip do not. With rounds.advantage = "group_std" it is GRPO as published.
"""

from __future__ import annotations

from torch import Tensor

from parl.learner.config import LossConfig
from parl.learner.losses.clipped import clipped_gain
from parl.learner.losses.tokens import LossTokens


def grpo(tokens: LossTokens, config: LossConfig) -> tuple[Tensor, Tensor]:
    gain, cut = clipped_gain(tokens.logprobs - tokens.old_logprobs, tokens.gain, config)
    sums, counts = tokens.per_sequence(gain)
    return -(sums / counts).sum() / tokens.num_sequences, cut.sum()
