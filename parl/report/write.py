"""report.md, curves.png and table.txt of a run folder, all read from the ledger."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from pathlib import Path

from infra.db.engine import Ledger
from parl.report import table, words
from parl.report.curves import draw_curves
from parl.report.history import RunHistory, read_history

VERSIONED = ("torch", "ray", "transformers", "numpy", "sqlalchemy")


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """Where the report is; ``text`` is the table for the terminal."""

    report: Path
    curves: Path
    table: Path
    text: str


def write_report(ledger: Ledger, run_id: str, run_dir: Path) -> ReportFiles:
    """Write (or overwrite) the report of ``run_id`` into ``run_dir``; works on unfinished runs.

    LedgerError when the ledger does not know the run.
    """
    history = read_history(ledger, run_id)
    files = ReportFiles(
        report=run_dir / "report.md",
        curves=run_dir / "curves.png",
        table=run_dir / "table.txt",
        text=table.as_text(table.before_after(history)) if history.evals else "",
    )
    draw_curves(history, files.curves)
    files.table.write_text(files.text + "\n", encoding="utf-8")
    files.report.write_text(as_markdown(history, run_dir), encoding="utf-8")
    return files


def as_markdown(history: RunHistory, run_dir: Path) -> str:
    """The whole report.md."""
    sections = [
        f"# Run {history.run_id}",
        _summary(history),
        "## Before and after",
        _before_after(history),
        "## Curves",
        "![curves](curves.png)",
        "## Engine against learner",
        _mismatch(history),
        "## Episodes",
        _episodes(history),
        "## Made with",
        _versions(history),
        "## Where things are",
        _places(history, run_dir),
    ]
    return "\n\n".join(sections) + "\n"


def _summary(history: RunHistory) -> str:
    seconds = history.updated_at - history.created_at
    line = (
        f"Status {history.status}, seed {history.seed}, {len(history.rounds)} of "
        f"{history.num_rounds} rounds committed, {words.duration(seconds)} from first to last row."
    )
    return f"{line}\n\nError: {history.error}" if history.error else line


def _before_after(history: RunHistory) -> str:
    rows = table.before_after(history)
    return table.as_markdown(rows) if rows else "No held-out evaluation is committed."


MISMATCHES = (
    "max_abs_dlogp",
    "mean_abs_dlogp",
    "mismatch_kl",
    "expert_flip_share",
    "selection_flip_share",
    "kv_code_flip_share",
)


def _mismatch(history: RunHistory) -> str:
    """Largest values over all rounds of what the loop measures every round."""
    lines = ["| over all rounds | largest |", "|---|---:|"]
    for key in MISMATCHES:
        values = [report.metrics[key] for report in history.rounds if key in report.metrics]
        if values:
            lines.append(f"| {key} | {max(values):.3g} |")
    return "\n".join(lines) if len(lines) > 2 else "No round is committed."


def _episodes(history: RunHistory) -> str:
    lines = [f"- by state: {_listed(history.episode_states)}"]
    if history.drop_reasons:
        lines.append(f"- dropped: {_listed(history.drop_reasons)}")
    if history.errors:
        lines.append(f"- errors: {_listed(history.errors)}")
    if history.open_rounds:
        lines.append(f"- open rounds: {', '.join(history.open_rounds)}")
    return "\n".join(lines)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _versions(history: RunHistory) -> str:
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in VERSIONED)
    return (
        f"- commit {history.code_commit or 'unknown'}\n"
        f"- python {platform.python_version()}, {packages}"
    )


def _places(history: RunHistory, run_dir: Path) -> str:
    known = {
        "config.toml": "the whole configuration, defaults included",
        "ledger.db": "every episode, token, reward and event",
        "log.jsonl": "log",
        "metrics.jsonl": "metrics by round",
        "checkpoints": "parameters and optimizer",
        "weights": "published versions",
    }
    lines = [f"- `{name}`: {what}" for name, what in known.items() if (run_dir / name).exists()]
    lines.append(f"- weight versions in the ledger: {history.num_weight_versions}")
    if history.checkpoints:
        name, path = list(history.checkpoints.items())[-1]
        lines.append(f"- last checkpoint ({name}): `{Path(path).name}`")
    lines.append(f"- any episode: `parl rl show {history.run_id}/train/00000/00000/000`")
    return "\n".join(lines)
