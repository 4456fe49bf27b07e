"""R - mean of the group (K2.5 report 4.4.2; no division by the standard deviation).

Violators stay out of the mean, or one at -1 would make wrong answers look acceptable (facts 3.5);
their advantage is taken against the mean of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def group_mean(rewards: np.ndarray, groups: Sequence[str], violation: np.ndarray) -> np.ndarray:
    """float64 [n]; a group of violators only has the mean of its own rewards as baseline."""
    advantages = np.zeros(len(rewards))
    names = np.array(groups)
    for name in dict.fromkeys(groups):
        members = names == name
        honest = members & ~violation
        baseline = rewards[honest if honest.any() else members].mean()
        advantages[members] = rewards[members] - baseline
    return advantages
