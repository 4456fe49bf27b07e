"""Policy losses by name. All take flat token vectors of one micro-batch.

logprobs, old_logprobs, advantages: float32 [n] over trained tokens; ``norm`` is the number of
tokens generated in the whole batch, so micro-batches add up. Returns (loss, number of tokens whose
policy gradient was masked).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from parl.learner.config import LossConfig
from parl.learner.losses.k25_token_mask import k25_token_mask
from parl.learner.losses.ppo_clip import ppo_clip

PolicyLoss = Callable[[Tensor, Tensor, Tensor, float, LossConfig], tuple[Tensor, Tensor]]

LOSSES: dict[str, PolicyLoss] = {"k25_token_mask": k25_token_mask, "ppo_clip": ppo_clip}
