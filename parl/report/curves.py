"""curves.png: five panels over the rounds, drawn from a RunHistory without a display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from parl.report.history import RunHistory
from parl.rounds.reports import RoundReport

COLOURS: tuple[str, ...] = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#4a5568")
SMOOTH_ROUNDS = 5
MISMATCH_LIMIT = 1e-4
"""max |dlogp| in fp32 that the loop promises on tokens without an expert flip."""


def draw_curves(history: RunHistory, path: Path) -> None:
    """Write a PNG; also drawn (with a remark) when no round is committed yet."""
    rounds = history.rounds
    figure, axes = plt.subplots(
        5, 1, figsize=(9, 13), sharex=True, height_ratios=(3, 3, 2, 1.1, 2), layout="constrained"
    )
    figure.suptitle(_title(history), fontsize=11, x=0.01, ha="left")
    x = np.array([report.index + 1 for report in rounds])
    colours = dict(zip(history.task_types, COLOURS * 10, strict=False))
    _panel_success(axes[0], history, x, colours)
    _panel_tokens(axes[1], history, x, colours)
    _panel_reward(axes[2], rounds, x)
    _panel_gate(axes[3], history, x, colours)
    _panel_mismatch(axes[4], rounds, x)
    axes[-1].set_xlabel("round")
    if len(x):
        axes[-1].set_xlim(0, x[-1] + 1)
    else:
        axes[0].text(0.5, 0.5, "no committed round yet", transform=axes[0].transAxes, ha="center")
    for axis in axes:
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _title(history: RunHistory) -> str:
    return (
        f"{history.run_id}   seed {history.seed}   commit {history.code_commit[:10] or '-'}   "
        f"{len(history.rounds)} rounds"
    )


def _panel_success(axis: Any, history: RunHistory, x: np.ndarray, colours: dict[str, str]) -> None:
    _lines(axis, history, x, colours, lambda report: report.success)
    axis.set_ylabel("success")
    axis.set_ylim(-0.03, 1.03)
    _evals(axis, history, x, lambda e: e.success, "held-out, all types")
    _legend(axis, "best")


def _panel_tokens(axis: Any, history: RunHistory, x: np.ndarray, colours: dict[str, str]) -> None:
    _lines(axis, history, x, colours, lambda report: report.mean_tokens, label="{} per episode")
    for name in history.task_types:
        solved = [report.tokens_per_solved.get(name) for report in history.rounds]
        y = np.array([np.nan if value is None else value for value in solved], float)
        axis.plot(x, _smooth(y), "--", color=colours[name], lw=1.2, label=f"{name} per solved task")
    _evals(axis, history, x, lambda e: e.mean_tokens, "held-out, per episode")
    axis.set_ylabel("policy tokens")
    axis.set_ylim(bottom=0, top=_token_limit(history))
    _legend(axis, "best", 2)


def _token_limit(history: RunHistory) -> float | None:
    """Tokens per solved task explode while nearly nothing is solved; keep the episodes readable."""
    means = [v for report in history.rounds for v in report.mean_tokens.values()]
    return 2.5 * max(means) if means else None


def _panel_reward(axis: Any, rounds: Sequence[RoundReport], x: np.ndarray) -> None:
    y = np.array([report.reward_mean for report in rounds])
    axis.plot(x, y, color="#a0aec0", lw=0.8)
    axis.plot(x, _smooth(y), color="#1a202c", lw=1.6, label="mean reward")
    axis.set_ylabel("reward")
    _legend(axis, "best")


def _panel_gate(axis: Any, history: RunHistory, x: np.ndarray, colours: dict[str, str]) -> None:
    """One bar a task type where its gate is open; the background shades stage 1."""
    names = history.task_types
    for row, name in enumerate(names):
        is_open = [report.gate_open.get(name, False) for report in history.rounds]
        spans = [(start - 0.5, length) for start, length in _runs(x, is_open)]
        axis.broken_barh(spans, (row - 0.3, 0.6), color=colours[name], zorder=2)
    for start, length in _runs(x, [report.stage > 0 for report in history.rounds]):
        axis.axvspan(start - 0.5, start - 0.5 + length, color="#faf089", alpha=0.5, lw=0, zorder=0)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(-0.6, max(len(names), 1) - 0.4)
    axis.set_ylabel("gate open")
    axis.set_title("bars: accuracy gate open; yellow: stage 1 (efficiency)", fontsize=8, loc="left")


def _panel_mismatch(axis: Any, rounds: Sequence[RoundReport], x: np.ndarray) -> None:
    """log scale; a difference of exactly zero is drawn at the lower edge."""
    for key, colour in (("max_abs_dlogp", COLOURS[1]), ("mean_abs_dlogp", COLOURS[0])):
        y = np.array([report.metrics.get(key, np.nan) for report in rounds], float)
        if np.isfinite(y).any():
            axis.plot(x, np.maximum(y, 1e-9), color=colour, lw=1.2, label=key)
    axis.axhline(MISMATCH_LIMIT, color="#e53e3e", lw=0.8, ls=":", label=f"limit {MISMATCH_LIMIT:g}")
    axis.set_yscale("log")
    axis.set_ylabel("engine vs learner")
    _legend(axis, "upper right", 3)


def _lines(
    axis: Any,
    history: RunHistory,
    x: np.ndarray,
    colours: dict[str, str],
    pick: Callable[[RoundReport], dict[str, float]],
    label: str = "{}",
) -> None:
    """Thin raw line and thick running mean for each task type."""
    for name in history.task_types:
        y = np.array([pick(report).get(name, np.nan) for report in history.rounds], float)
        axis.plot(x, y, color=colours[name], lw=0.7, alpha=0.4)
        axis.plot(x, _smooth(y), color=colours[name], lw=1.8, label=label.format(name))


def _evals(axis: Any, history: RunHistory, x: np.ndarray, pick: Any, label: str) -> None:
    at = {"before": 0, "after": int(x[-1]) + 0.5 if len(x) else 0.5}
    points = [(at[n], pick(e)) for n, e in history.evals.items() if n in at]
    if points:
        axis.plot(
            *zip(*points, strict=True),
            "D",
            color="#1a202c",
            ms=5,
            label=label,
            zorder=5,
            clip_on=False,
        )


def _legend(axis: Any, place: str, ncols: int = 1) -> None:
    """matplotlib warns about an axis that has nothing to explain."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc=place, fontsize=8, frameon=False, ncols=ncols)


def _smooth(y: np.ndarray) -> np.ndarray:
    """Running mean over the last SMOOTH_ROUNDS rounds that have a value."""
    result = np.full(len(y), np.nan)
    for index in range(len(y)):
        window = y[max(0, index - SMOOTH_ROUNDS + 1) : index + 1]
        if np.isfinite(window).any():
            result[index] = np.nanmean(window)
    return result


def _runs(x: np.ndarray, flags: Sequence[bool]) -> list[tuple[float, int]]:
    """(first x, length) of each stretch of true flags."""
    spans: list[tuple[float, int]] = []
    previous = False
    for position, flag in zip(x, flags, strict=True):
        if flag and previous:
            start, length = spans[-1]
            spans[-1] = (start, length + 1)
        elif flag:
            spans.append((float(position), 1))
        previous = flag
    return spans
