"""Policy losses by name, one file each.

Each takes the tokens of one micro-batch and the section ``learner.loss``, and returns (loss, number
of tokens whose policy gradient was cut off).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from parl.learner.config import LossConfig
from parl.learner.losses.cispo import cispo
from parl.learner.losses.dr_grpo import dr_grpo
from parl.learner.losses.grpo import grpo
from parl.learner.losses.gspo import gspo
from parl.learner.losses.k2_sequence import k2_sequence
from parl.learner.losses.k25_token_mask import k25_token_mask
from parl.learner.losses.ppo_clip import ppo_clip
from parl.learner.losses.tokens import LossTokens

PolicyLoss = Callable[[LossTokens, LossConfig], tuple[Tensor, Tensor]]

LOSSES: dict[str, PolicyLoss] = {
    "k25_token_mask": k25_token_mask,
    "k2_sequence": k2_sequence,
    "ppo_clip": ppo_clip,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "cispo": cispo,
}

__all__ = ["LOSSES", "LossTokens", "PolicyLoss"]
