"""What a policy loss sees of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossTokens:
    """Flat vectors over the trained tokens of a micro-batch, which holds whole sequences.

    logprobs float [n] with gradient; old_logprobs, advantages float [n]; sequence int64 [n], which
    of the micro-batch's sequences each belongs to, rising. ``weights`` float [n] or None: what
    mismatch correction multiplies a token's policy gradient with. ``num_tokens`` and
    ``num_sequences`` are the whole batch's over all ranks, so micro-batches add up.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    sequence: Tensor
    num_tokens: float
    num_sequences: float
    weights: Tensor | None = None

    @property
    def gain(self) -> Tensor:
        """Advantages, corrected where a correction is on."""
        return self.advantages if self.weights is None else self.advantages * self.weights

    def per_sequence(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(sums, counts) float [S] of ``values`` [n]; S = sequences here that train any token."""
        _, index = self.sequence.unique_consecutive(return_inverse=True)
        size = int(index[-1]) + 1 if len(index) else 0
        sums = torch.zeros(size, dtype=values.dtype).index_add(0, index, values)
        return sums, torch.bincount(index, minlength=size).to(values.dtype)

    def spread(self, values: Tensor) -> Tensor:
        """A value a sequence [S] -> a value a token [n]."""
        _, index = self.sequence.unique_consecutive(return_inverse=True)
        return values[index]
