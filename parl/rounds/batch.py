"""From scored trajectories to what the learner gets: samples and advantages, in ledger order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parl.learner.advantages import advantages_for
from parl.trajectory import TrainingSample, Trajectory
from reward_models.episode import VIOLATIONS, RewardBreakdown

PERMUTE_STREAM = 7
"""Keeps the control experiment's shuffles apart from every other use of the run seed."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples that are trained on, their advantages, and who stayed out and why.

    ``advantages`` has one number a sample; ``dropped`` is episode id -> reason.
    """

    samples: list[TrainingSample]
    advantages: list[float]
    dropped: dict[str, str]


def make_batch(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[RewardBreakdown],
    *,
    advantage: str,
    permute_seed: int | None = None,
) -> Batch:
    """Group-relative advantages over one round.

    Episodes without a reward or without a token are left out of every baseline and of the batch.
    With ``permute_seed`` the scored rewards change owners inside each group (the control run).
    """
    scored = [
        (trajectory, breakdown)
        for trajectory, breakdown in zip(trajectories, rewards, strict=True)
        if breakdown.total is not None and trajectory.turns
    ]
    kept = {trajectory.episode_id for trajectory, _ in scored}
    dropped = {
        t.episode_id: f"no reward: outcome {t.outcome}"
        if b.total is None
        else f"no sampled tokens: outcome {t.outcome}"
        for t, b in zip(trajectories, rewards, strict=True)
        if t.episode_id not in kept
    }
    values = np.array([b.total for _, b in scored], dtype=np.float64)
    groups = [t.group_key for t, _ in scored]
    violation = np.array([t.outcome in VIOLATIONS for t, _ in scored], dtype=bool)
    if permute_seed is not None:
        order = permutation_in_groups(groups, permute_seed)
        values, violation = values[order], violation[order]
    return Batch(
        samples=[t.to_training_sample() for t, _ in scored],
        advantages=[float(a) for a in advantages_for(advantage, values, groups, violation)],
        dropped=dropped,
    )


def permutation_in_groups(groups: Sequence[str], seed: int) -> np.ndarray:
    """int64 [n]: index array that shuffles members inside each group and nothing across groups."""
    order = np.arange(len(groups))
    names = np.array(groups)
    for position, name in enumerate(dict.fromkeys(groups)):
        members = np.flatnonzero(names == name)
        rng = np.random.Generator(np.random.Philox(key=[seed, PERMUTE_STREAM + (position << 16)]))
        order[members] = rng.permutation(members)
    return order
