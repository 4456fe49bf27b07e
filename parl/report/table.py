"""The before/after table, as text for a terminal and as Markdown for report.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parl.report import words
from parl.report.history import RunHistory
from parl.rounds.reports import EvalReport


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    before: str
    after: str
    change: str


def before_after(history: RunHistory) -> list[Row]:
    """Held-out success and tokens, overall and by task type; empty without evaluations."""
    before, after = history.evals.get("before"), history.evals.get("after")
    if before is None and after is None:
        return []
    rows = [_rate_row("success", _success(before), _success(after))]
    for name in history.task_types:
        rows.append(_rate_row(f"  {name}", _success(before, name), _success(after, name)))
    rows.append(_tokens_row("tokens per episode", _tokens(before), _tokens(after)))
    for name in history.task_types:
        rows.append(_tokens_row(f"  {name}", _tokens(before, name), _tokens(after, name)))
    rows.append(_tokens_row("tokens per solved task", _solved(before), _solved(after)))
    rows.append(Row("episodes", _count(before), _count(after), ""))
    return rows


def as_text(rows: Sequence[Row]) -> str:
    """Columns aligned for a terminal; no trailing newline."""
    table = [("held-out", "before", "after", "change")]
    table += [(row.label, row.before, row.after, row.change) for row in rows]
    widths = [max(len(line[column]) for line in table) for column in range(4)]
    lines = [
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        ).rstrip()
        for line in table
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def as_markdown(rows: Sequence[Row]) -> str:
    lines = ["| held-out | before | after | change |", "|---|---:|---:|---:|"]
    for row in rows:
        label = row.label.strip() if not row.label.startswith(" ") else f"— {row.label.strip()}"
        lines.append(f"| {label} | {row.before} | {row.after} | {row.change} |")
    return "\n".join(lines)


def _success(report: EvalReport | None, task_type: str | None = None) -> float | None:
    if report is None:
        return None
    return report.success if task_type is None else report.success_by_type.get(task_type)


def _tokens(report: EvalReport | None, task_type: str | None = None) -> float | None:
    if report is None:
        return None
    return report.mean_tokens if task_type is None else report.mean_tokens_by_type.get(task_type)


def _solved(report: EvalReport | None) -> float | None:
    return None if report is None else report.tokens_per_solved


def _count(report: EvalReport | None) -> str:
    return "-" if report is None else str(report.episodes)


def _rate_row(label: str, before: float | None, after: float | None) -> Row:
    change = "" if before is None or after is None else f"{after - before:+.3f}"
    return Row(label, words.rate(before), words.rate(after), change)


def _tokens_row(label: str, before: float | None, after: float | None) -> Row:
    change = "" if not before or after is None else f"{100 * (after / before - 1):+.0f} %"
    return Row(label, words.tokens(before), words.tokens(after), change)
