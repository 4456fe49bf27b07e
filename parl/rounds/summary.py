"""Counts of a round or an evaluation, from its trajectories alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from parl.rounds.reports import EvalReport, RoundReport
from parl.store.values import TypeStats
from parl.trajectory import Trajectory
from reward_models.episode import RewardBreakdown
from reward_models.stages import RewardState


def by_type(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    """Scored trajectories (those with a correctness) by task type, types in name order."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.correctness is not None:
            groups.setdefault(trajectory.task_type, []).append(trajectory)
    return dict(sorted(groups.items()))


def success(trajectories: Sequence[Trajectory]) -> float:
    """Mean correctness; 0 for no episodes."""
    return _mean([t.correctness or 0.0 for t in trajectories])


def mean_tokens(trajectories: Sequence[Trajectory]) -> float:
    """Sampled tokens per episode; 0 for no episodes."""
    return _mean([float(t.num_sampled) for t in trajectories])


def tokens_per_solved(trajectories: Sequence[Trajectory]) -> float | None:
    """All sampled tokens over the number of solved episodes; None when none is solved."""
    solved = sum(t.correctness == 1.0 for t in trajectories)
    return sum(t.num_sampled for t in trajectories) / solved if solved else None


def round_report(
    index: int,
    num_rounds: int,
    trajectories: Sequence[Trajectory],
    breakdowns: Sequence[RewardBreakdown],
    state: RewardState,
    metrics: Mapping[str, float],
    weight_version: int,
) -> RoundReport:
    """Round ``index`` in numbers; ``state`` and ``weight_version`` are those after its update."""
    groups = by_type(trajectories)
    return RoundReport(
        index=index,
        num_rounds=num_rounds,
        phase="train",
        success={name: success(rows) for name, rows in groups.items()},
        mean_tokens={name: mean_tokens(rows) for name, rows in groups.items()},
        tokens_per_solved={name: tokens_per_solved(rows) for name, rows in groups.items()},
        gate_open={name: state.is_open(name) for name in groups},
        stage=state.stage,
        reward_mean=_mean([b.total for b in breakdowns if b.total is not None]),
        metrics=dict(metrics),
        outcomes=dict(Counter(str(t.outcome) for t in trajectories)),
        weight_version=weight_version,
    )


def eval_report(name: str, trajectories: Sequence[Trajectory], version: int) -> EvalReport:
    """An evaluation in numbers; episodes without a verdict count only as an outcome."""
    groups = by_type(trajectories)
    scored = [t for rows in groups.values() for t in rows]
    return EvalReport(
        name=name,
        episodes=len(scored),
        success=success(scored),
        success_by_type={n: success(rows) for n, rows in groups.items()},
        mean_tokens=mean_tokens(scored),
        mean_tokens_by_type={n: mean_tokens(rows) for n, rows in groups.items()},
        tokens_per_solved=tokens_per_solved(scored),
        outcomes=dict(Counter(str(t.outcome) for t in trajectories)),
        weight_version=version,
    )


def type_stats(trajectories: Sequence[Trajectory], state: RewardState) -> list[TypeStats]:
    """One row per task type for the ledger's commit."""
    return [
        TypeStats(
            task_type=name,
            num_episodes=sum(t.task_type == name for t in trajectories),
            num_scored=len(rows),
            num_correct=sum(t.correctness == 1.0 for t in rows),
            mean_tokens=mean_tokens(rows),
            tokens_per_solved=tokens_per_solved(rows),
            gate_open=state.is_open(name),
        )
        for name, rows in by_type(trajectories).items()
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
