"""(R - mean) / max(std, FLOOR) of the group: GRPO's form with a floor under the divisor
(facts/sft-rewards.md 3.5, ``decoupled(sd_floor)``).

Above the floor it is group_std, below it group_mean / FLOOR: in a group that is all correct the
length pressure goes with the efficiency weight again. 0/1 rewards of 2 to 8 samples that differ
have a std of .33 to .5, so the divisor of any group lies within a factor of 2.

Trap: the floor is a number on the scale of 0/1 rewards. Where rewards are a tenth as large it is
group_mean with ten times too small a step; where the spread of correct answers alone passes it
(efficiency weight x spread > .25, or parts that add up to several points) group_std's own trap is
back, and the weight cancels. Prefer group_mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FLOOR = 0.25


def decoupled(rewards: np.ndarray, groups: Sequence[str], violation: np.ndarray) -> np.ndarray:
    """float64 [n]. Violators are out of mean and std and are measured by the others'."""
    advantages = np.zeros(len(rewards))
    names = np.array(groups)
    for name in dict.fromkeys(groups):
        members = names == name
        honest = members & ~violation
        base = rewards[honest if honest.any() else members]
        advantages[members] = (rewards[members] - base.mean()) / max(base.std(), FLOOR)
    return advantages
