"""Evidence (a): three seeds of the demo, and a control run with permuted rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parl.bench.command import ROOT, run_parl
from parl.bench.records import Item
from parl.cli.runs import find_run
from parl.report.history import RunHistory, read_history

CONFIG = ROOT / "configs" / "demo.toml"
SEEDS = (1, 2, 3)
TIMEOUT_S = 1800.0
MIN_AFTER, MAX_BEFORE, MAX_CONTROL_GAIN = 0.87, 0.60, 0.05
MAX_DLOGP, MAX_FLIPS = 1e-4, 1e-3


def items(folder: Path) -> list[Item]:
    seeds = [Item(f"seed-{seed}", _Demo(folder, seed, permuted=False)) for seed in SEEDS]
    return [*seeds, Item("control-1", _Demo(folder, SEEDS[0], permuted=True))]


class _Demo:
    """One run of configs/demo.toml from a fresh process; called = measured."""

    def __init__(self, folder: Path, seed: int, *, permuted: bool) -> None:
        self._folder = folder
        self._seed = seed
        self._permuted = permuted

    def __call__(self) -> dict[str, Any]:
        name = f"{'control' if self._permuted else 'seed'}-{self._seed}"
        runs = self._folder / name
        words = ["rl", "run", "--config", str(CONFIG)]
        words += ["--set", f"run.seed={self._seed}", "--set", f"run.dir={runs}"]
        words += ["--set", f"rounds.permute_rewards={str(self._permuted).lower()}"]
        done = run_parl(words, self._folder / f"{name}.log", TIMEOUT_S)
        if done.code != 0:
            return {"ok": False, "exit_code": done.code, "output": done.last_lines}
        run = find_run(None, runs)
        history = read_history(run.open_ledger(), run.run_id)
        data = measured(history)
        data["wall_s"] = round(done.seconds, 1)
        data["run_dir"] = (
            str(run.path.relative_to(ROOT)) if ROOT in run.path.parents else run.run_id
        )
        data["ok"] = control_holds(data) if self._permuted else seed_holds(data)
        return data


def measured(history: RunHistory) -> dict[str, Any]:
    """Success and tokens before and after, and the largest engine-learner mismatch."""
    before, after = history.evals["before"], history.evals["after"]
    return {
        "success_before": before.success,
        "success_after": after.success,
        "success_by_type_after": after.success_by_type,
        "gain": after.success - before.success,
        "tokens_before": before.mean_tokens,
        "tokens_after": after.mean_tokens,
        "tokens_change": after.mean_tokens / before.mean_tokens - 1,
        "tokens_per_solved_before": before.tokens_per_solved,
        "tokens_per_solved_after": after.tokens_per_solved,
        "episodes": after.episodes,
        "rounds": len(history.rounds),
        "max_abs_dlogp": _largest(history, "max_abs_dlogp"),
        "max_expert_flip_share": _largest(history, "expert_flip_share"),
    }


def seed_holds(data: dict[str, Any]) -> bool:
    """The promises for one seed; those for the mean of three are in loop_evidence.summary."""
    return (
        data["success_after"] >= MIN_AFTER
        and data["success_before"] <= MAX_BEFORE
        and data["max_abs_dlogp"] < MAX_DLOGP
        and data["max_expert_flip_share"] <= MAX_FLIPS
    )


def control_holds(data: dict[str, Any]) -> bool:
    """Without the learner's signal nothing is learnt."""
    return data["gain"] < MAX_CONTROL_GAIN


def _largest(history: RunHistory, key: str) -> float:
    return max(report.metrics[key] for report in history.rounds)
