"""Advantage estimators by name: rewards, group keys and violation flags in, advantages out.

Arrays are float64 [n]; an episode without a reward never gets here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from infra.errors import ConfigError
from parl.learner.advantages.decoupled import decoupled
from parl.learner.advantages.group_mean import group_mean
from parl.learner.advantages.group_std import group_std

Estimator = Callable[[np.ndarray, Sequence[str], np.ndarray], np.ndarray]

ESTIMATORS: dict[str, Estimator] = {
    "group_mean": group_mean,
    "group_std": group_std,
    "decoupled": decoupled,
}


def check_estimator(kind: str) -> None:
    """ConfigError lists the known ones."""
    if kind not in ESTIMATORS:
        raise ConfigError(
            f"rounds.advantage={kind!r} is unknown; expected one of {', '.join(ESTIMATORS)}"
        )


def advantages_for(
    kind: str, rewards: np.ndarray, groups: Sequence[str], violation: np.ndarray
) -> np.ndarray:
    """Run estimator ``kind``; ConfigError lists the known ones."""
    check_estimator(kind)
    assert np.isfinite(rewards).all(), "an episode without a reward is in the batch: drop it first"
    return ESTIMATORS[kind](rewards, groups, violation)
