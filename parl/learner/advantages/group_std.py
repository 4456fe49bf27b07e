"""(R - mean) / std of the group: GRPO's form, kept for comparison.

Trap (facts 3.5): in a group that is all correct the result does not depend on the efficiency
weight, so the length pressure jumps 35-250 times between groups. Prefer group_mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EPS = 1e-6


def group_std(rewards: np.ndarray, groups: Sequence[str], violation: np.ndarray) -> np.ndarray:
    """float64 [n]; zero where the group has no spread. Violators are scaled by the others' std."""
    advantages = np.zeros(len(rewards))
    names = np.array(groups)
    for name in dict.fromkeys(groups):
        members = names == name
        honest = members & ~violation
        base = rewards[honest if honest.any() else members]
        spread = base.std()
        if spread > EPS:
            advantages[members] = (rewards[members] - base.mean()) / spread
        else:
            advantages[members] = np.where(violation[members], rewards[members] - base.mean(), 0.0)
    return advantages
