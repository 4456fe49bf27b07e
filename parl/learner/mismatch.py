"""Weights that correct for an engine whose probabilities are not quite the learner's.

The engine sampled from pi_engine (INT8 cache, other kernels, an older version), the learner knows
pi_old from its own forward. rho = pi_old / pi_engine is what importance sampling asks for; its
tails ruin training, so each kind tames them in its own way.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parl.learner.config import CorrectionConfig
from parl.learner.losses.tokens import LossTokens


def correction_weights(
    tokens: LossTokens, engine_logprobs: Tensor, config: CorrectionConfig
) -> tuple[Tensor | None, int]:
    """(weights [n] or None, tokens whose weight is 0). ``tokens.old_logprobs``: the learner's own.

    token_tis: min(rho_i, high) (truncated importance sampling, Yao et al. 2025). sequence_tis: the
    same of a sequence's product. icepop: rho_i inside [low, high], else 0 (Ring-1T). sequence_mask:
    1 where a sequence's geometric mean of rho lies inside [low, high], else 0.
    """
    if config.kind == "none":
        return None, 0
    with torch.no_grad():
        log_rho = tokens.old_logprobs - engine_logprobs
        low, high = math.log(config.low), math.log(config.high)
        if config.kind == "token_tis":
            weights = log_rho.clamp(max=high).exp()
        elif config.kind == "icepop":
            inside = (log_rho >= low) & (log_rho <= high)
            weights = torch.where(inside, log_rho, torch.full_like(log_rho, -torch.inf)).exp()
        else:
            sums, counts = tokens.per_sequence(log_rho)
            if config.kind == "sequence_tis":
                weights = tokens.spread(sums.clamp(max=high).exp())
            else:
                means = sums / counts
                kept = (means >= low) & (means <= high)
                weights = tokens.spread(kept.to(log_rho.dtype))
        return weights, int((weights == 0).sum())
