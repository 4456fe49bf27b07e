"""``python -m reward_models.bench.toy``: what each reward scheme makes of a policy that only
chooses how long to think (the table of facts/sft-rewards.md 3.5, on our own reward model).

Two task types. A policy per type draws one of five lengths, the shortest being to give up; longer
thinking is more often right, on hard tasks much more. REINFORCE on groups of 8 with the rewards of
``RewardModel``: which lengths survive?
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reward_models.config import RewardConfig
from reward_models.episode import Episode, Outcome
from reward_models.stages import RewardModel

LENGTHS = (8, 200, 400, 800, 1600)
RIGHT = {"easy": (0.0, 0.90, 0.96, 0.96, 0.96), "hard": (0.0, 0.25, 0.45, 0.80, 0.90)}
"""Share of right answers by length."""
BUDGET = 500.0
UNITS = {"calls": BUDGET / 40.0}
GROUPS, SAMPLES = 8, 8
FAR = 10**9
"""As a budget: none."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """``std``: advantages over the group's standard deviation; ``bonus``: a length bonus for every
    answer, right or wrong (a peer's scheme, for comparison)."""

    name: str
    reward: dict[str, Any]
    std: bool = False
    bonus: float = 0.0
    budgeted: bool = True


ALWAYS = {"open_above": 0.0, "close_below": 0.0, "min_samples": 1}
STAGE0 = {"kind": "stage0"}
STAGE1 = {"kind": "stage1"}
SCHEMES = [
    Scheme("no budget", {"schedule": STAGE0}, budgeted=False),
    Scheme("budget always on", {"schedule": STAGE0, "gate": ALWAYS}),
    Scheme("gate without hysteresis", {"schedule": STAGE0, "gate": {"close_below": 0.85}}),
    Scheme("gate with hysteresis", {"schedule": STAGE0}),
    Scheme(
        "soft over budget, always on",
        {"schedule": STAGE0, "gate": ALWAYS, "budget": {"over_budget": "soft"}},
    ),
    Scheme("efficiency w = 0.2, mean", {"schedule": STAGE1, "gate": ALWAYS}),
    Scheme("efficiency w = 0.2, std", {"schedule": STAGE1, "gate": ALWAYS}, std=True),
    Scheme(
        "efficiency w = 1.0, std",
        {"schedule": STAGE1, "gate": ALWAYS, "efficiency": {"weight": 1.0}},
        std=True,
    ),
    Scheme(
        "length bonus for wrong ones too, std", {"schedule": STAGE0}, std=True, bonus=0.2,
        budgeted=False,
    ),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """Of the last quarter of the updates."""

    accuracy: float
    tokens: float
    flips: int


def play(scheme: Scheme, seed: int, updates: int = 400, rate: float = 0.15) -> dict[str, Result]:
    """Train one policy a type; what it became."""
    draw = np.random.default_rng([20261130, seed])
    model = RewardModel(_config(scheme))
    state = model.initial_state()
    logits = {kind: np.zeros(len(LENGTHS)) for kind in RIGHT}
    seen: dict[str, list[tuple[float, float]]] = {kind: [] for kind in RIGHT}
    flips = dict.fromkeys(RIGHT, 0)
    for _ in range(updates):
        episodes: list[Episode] = []
        chosen: dict[str, np.ndarray] = {}
        for kind in RIGHT:
            policy = softmax(logits[kind])
            actions = draw.choice(len(LENGTHS), size=(GROUPS, SAMPLES), p=policy)
            right = draw.random(actions.shape) < np.array(RIGHT[kind])[actions]
            chosen[kind] = actions
            episodes += _episodes(kind, actions, right, scheme.budgeted)
            seen[kind].append((float(right.mean()), float(np.array(LENGTHS)[actions].mean())))
        rewards = [answer.total for answer in model.score_all(episodes, state)]
        for number, kind in enumerate(RIGHT):
            rows = slice(number * GROUPS * SAMPLES, (number + 1) * GROUPS * SAMPLES)
            values = np.array(rewards[rows], float).reshape(GROUPS, SAMPLES)
            values += scheme.bonus * (1 - np.array(LENGTHS)[chosen[kind]] / max(LENGTHS))
            logits[kind] += rate * _gradient(values, chosen[kind], logits[kind], scheme.std)
        after, events = model.fold(state, episodes)
        for event in events:
            if event["kind"] == "gate":
                flips[event["key"]] += 1
        state = after
    last = updates // 4
    means = {kind: np.array(seen[kind][-last:]).mean(axis=0) for kind in RIGHT}
    return {kind: Result(float(m[0]), float(m[1]), flips[kind]) for kind, m in means.items()}


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _config(scheme: Scheme) -> RewardConfig:
    # the toy knows no prompts, so the second gate would hide what the first one does
    values = {"group_gate": {"enabled": False}, **scheme.reward}
    values["budget"] = {"minimum": 0, "phi_min": 0.0, **values.get("budget", {})}
    return RewardConfig.model_validate(values)


def _episodes(kind: str, actions: np.ndarray, right: np.ndarray, budgeted: bool) -> list[Episode]:
    return [
        Episode(
            episode_id=f"{kind}-{group}-{sample}",
            task_name=kind,
            task_type=kind,
            outcome=Outcome.COMPLETED,
            correctness=float(right[group, sample]),
            num_tokens=LENGTHS[int(action)],
            num_turns=1,
            num_calls=0,
            final_text="cannot determine" if action == 0 else "an answer",
            budget_units=UNITS if budgeted else {"calls": FAR},
            min_tokens=LENGTHS[1],
            group_key=f"{kind}/{group}",
        )
        for (group, sample), action in np.ndenumerate(actions)
    ]


def _gradient(
    rewards: np.ndarray, actions: np.ndarray, logits: np.ndarray, std: bool
) -> np.ndarray:
    """Mean over samples of A * d log p / d logits."""
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    if std:
        advantages /= rewards.std(axis=1, keepdims=True) + 1e-6
    one_hot = np.eye(len(logits))[actions]
    return (advantages[..., None] * (one_hot - softmax(logits))).mean(axis=(0, 1)) * len(logits)


def table(seeds: Sequence[int], updates: int = 400) -> list[str]:
    """A line a scheme: accuracy and tokens by type, gate flips of the hard one; means."""
    lines = [f"{'scheme':38s} {'easy':>12s} {'hard':>12s} {'flips (hard)':>13s}"]
    for scheme in SCHEMES:
        results = [play(scheme, seed, updates) for seed in seeds]
        cells = [
            f"{np.mean([r[kind].accuracy for r in results]):.3f} / "
            f"{np.mean([r[kind].tokens for r in results]):4.0f}"
            for kind in RIGHT
        ]
        flips = np.mean([r["hard"].flips for r in results])
        lines.append(f"{scheme.name:38s} {cells[0]:>12s} {cells[1]:>12s} {flips:13.1f}")
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(table(range(5))) + "\n")
