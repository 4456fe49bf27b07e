"""Drive a run from wherever its ledger says it is to its end, and leave a report."""

from __future__ import annotations

import contextlib
from typing import TextIO

import typer

from infra.db.engine import Ledger
from infra.errors import LedgerError, ParlError
from infra.log import bind, configure
from infra.metrics import Metrics
from parl.cli.runs import RunFolder, sole_driver
from parl.report.bar import open_progress
from parl.report.watchers import MetricsWatcher, Several
from parl.report.write import write_report
from parl.rounds.experiment import run_experiment
from parl.store.store import Store

INTERRUPTED = 130


def drive(folder: RunFolder, stream: TextIO) -> None:
    """Lines go to ``stream``. A ParlError passes through after the ledger and the user know how
    to go on; an interrupt ends with exit code 130."""
    with sole_driver(folder):
        ledger = folder.open_ledger()
        store = Store(ledger, folder.run_id)
        hint = f"resume with: parl rl resume {_shortest(folder)}"
        try:
            _run(folder, ledger, store, stream)
        except KeyboardInterrupt:
            _note(store, "stopped", "interrupted")
            typer.echo(f"interrupted; {hint}", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except ParlError as error:
            _note(store, "failed", str(error))
            typer.echo(f"stopped by an error; {hint}", file=stream)
            raise
        files = write_report(ledger, folder.run_id, folder.path)
        typer.echo(f"\n{files.text}\n\nreport  {files.report}\ncurves  {files.curves}", file=stream)


def _run(folder: RunFolder, ledger: Ledger, store: Store, stream: TextIO) -> None:
    configure(folder.path)
    bind(run=folder.run_id)
    metrics = Metrics(folder.path)
    port = metrics.serve(folder.config.run.metrics_port)
    typer.echo(f"run {folder.run_id} in {folder.path}", file=stream)
    if port is not None:
        typer.echo(f"metrics at http://127.0.0.1:{port}/metrics", file=stream)
    progress = Several([open_progress(stream), MetricsWatcher(metrics)])
    store.set_run_status("running")
    try:
        run_experiment(folder, ledger, progress)
    finally:
        metrics.close()


def _note(store: Store, status: str, error: str) -> None:
    """The run row says how the run ended; a ledger that cannot be written is the error itself."""
    with contextlib.suppress(LedgerError):
        store.set_run_status(status, error)


def _shortest(folder: RunFolder) -> str:
    """The id when the run is where `parl rl resume` looks by itself, else the path."""
    return folder.run_id if folder.path.parent.name == "runs" else str(folder.path)
