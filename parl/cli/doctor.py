"""``parl doctor``: what is installed, how tools are isolated and why, who waits for whom."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parl.cli.installed import Item, machine, packages, programs
from parl.cli.runs import DEFAULT_PARENT

if TYPE_CHECKING:
    from sandbox.backends.base import LevelReport


def doctor(
    run_name: Annotated[
        str | None, typer.Argument(help="Run id or path: also say who waits for whom in it.")
    ] = None,
    runs_dir: Annotated[
        Path, typer.Option("--dir", help="Parent of run folders.")
    ] = DEFAULT_PARENT,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Exit 1 when no isolating sandbox level works here."""
    from sandbox.backends.choice import probe

    sections = {"machine": machine(), "packages": packages(), "programs": programs()}
    levels = probe()
    facts: dict[str, Any] = {name: [asdict(i) for i in items] for name, items in sections.items()}
    facts["sandbox"] = {"level": _best(levels), "levels": [asdict(level) for level in levels]}
    lines = [line for name, items in sections.items() for line in _section(name, items)]
    lines += _levels(levels)
    if not as_json:
        # first, so that a run whose ledger cannot be read does not hide what the machine has
        typer.echo("\n".join(lines))
    if run_name is not None:
        facts["run"], run_lines = _run(run_name, runs_dir)
        if not as_json:
            typer.echo("\n".join(["", *run_lines]))
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    if _best(levels) is None:
        raise typer.Exit(1)


def _section(name: str, items: Sequence[Item]) -> list[str]:
    return [f"{name}:"] + [
        f"  {item.name:<14}{item.version or '(absent)':<22}{item.note}" for item in items
    ]


def _best(levels: Sequence[LevelReport]) -> str | None:
    """The level `sandbox.level = "auto"` takes; C never counts, it isolates nothing."""
    return next((str(r.level) for r in levels if r.available and str(r.level) in "AB"), None)


def _levels(levels: Sequence[LevelReport]) -> list[str]:
    best = _best(levels)
    lines = ["sandbox:"]
    for report in levels:
        mark = "<- used" if str(report.level) == best else ""
        state = "works" if report.available else "no"
        lines.append(f"  level {report.level}  {state:<6} {report.reason} {mark}".rstrip())
    if best is None:
        lines.append(
            "  no isolating level works here: install bubblewrap (apt-get install bubblewrap), or "
            "accept no isolation with --set sandbox.level=C --set sandbox.unsafe_local=true"
        )
    return lines


def _run(run_name: str, runs_dir: Path) -> tuple[dict[str, Any], list[str]]:
    from parl.cli.runs import find_run, status_now
    from parl.cli.waits import read_leases, read_waits, waits_text
    from parl.report.history import read_history

    folder = find_run(run_name, runs_dir)
    ledger = folder.open_ledger()
    history = read_history(ledger, folder.run_id)
    status = status_now(folder, history.status)
    workers, leases = read_waits(folder.path), read_leases(ledger)
    facts = {
        "id": folder.run_id,
        "status": status,
        "rounds": len(history.rounds),
        "open_rounds": history.open_rounds,
        "workers": [asdict(worker) for worker in workers],
        "leases": [asdict(lease) for lease in leases],
    }
    head = f"run {folder.run_id}: {status}, {len(history.rounds)} rounds committed"
    if history.open_rounds:
        head += f", now {', '.join(history.open_rounds)}"
    return facts, [head, *waits_text(workers, leases)]
