"""Drive a run from wherever its ledger says it is to its end, and leave a report."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol, TextIO

import typer

from infra.db.engine import Ledger
from infra.errors import LedgerError
from infra.leases import LeaseBook
from infra.log import bind, configure
from infra.metrics import Metrics
from parl.cli.runs import RunFolder, require_unedited, shortest, sole_driver
from parl.report.bar import open_progress
from parl.report.progress import WrittenLines
from parl.report.watchers import MetricsWatcher, Several
from parl.report.write import write_report
from parl.rounds.certified import require_certified
from parl.rounds.checkpoint import CHECKPOINTS, newest_intact
from parl.rounds.experiment import FINISHED, run_experiment
from parl.rounds.machine import WARM_START, RoundMachine
from parl.rounds.parts import RunParts
from parl.rounds.reports import RoundReport
from parl.store.store import Store
from sandbox.reaper import reap_box
from sandbox.shelf import LEASE_KIND

INTERRUPTED, TERMINATED = 130, 143


_heard: list[int] = []
"""The signal that is ending this process: inside its C++ calls Ray raises a plain KeyboardInterrupt
in place of what the handler raised."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: a scheduler's way to say Ctrl-C."""


def drive(folder: RunFolder, stream: TextIO) -> None:
    """Lines go to ``stream``. An error passes through after the ledger and the user know how to go
    on; Ctrl-C ends with exit code 130, SIGTERM with 143. A finished run only gets its report."""
    with sole_driver(folder), _own_signals():
        ledger = folder.open_ledger()
        store = Store(ledger, folder.run_id)
        hint = f"resume with: parl rl resume {shortest(folder)}"
        require_unedited(folder, store)
        try:
            _check_checkpoint(folder, store, stream)
            if store.run_status() != FINISHED:
                _run(folder, ledger, store, stream)
            files = write_report(ledger, folder.run_id, folder.path)
        except KeyboardInterrupt as interrupt:
            if _is_finished(store):
                hint = f"the run is finished; its report: parl rl report {shortest(folder)}"
            else:
                _note(store, "stopped", "interrupted")
            terminated = isinstance(interrupt, Terminated) or _heard == [signal.SIGTERM]
            typer.echo(f"{'terminated' if terminated else 'interrupted'}; {hint}", err=True)
            raise typer.Exit(TERMINATED if terminated else INTERRUPTED) from None
        except Exception as error:
            if not _is_finished(store):
                _note(store, "failed", f"{type(error).__name__}: {error}")
            typer.echo(f"stopped by an error; {hint}", file=stream)
            raise
        typer.echo(f"\n{files.text}\n\nreport  {files.report}\ncurves  {files.curves}", file=stream)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM are heard by ``_stop``, and afterwards as they were before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    _hear_signals()
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _hear_signals() -> None:
    """Also once Ray has connected: it installs a SIGTERM handler that aborts the process."""
    if threading.current_thread() is threading.main_thread():
        _heard.clear()
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    """Closing engines and boxes takes seconds: who asked for it hears at once. The stream may be
    in use where the signal came in, so this goes past it."""
    _heard[:] = [number]
    os.write(sys.stderr.fileno(), b"stopping: the engine and the boxes are being closed\n")
    if number == signal.SIGTERM:
        raise Terminated
    raise KeyboardInterrupt


def _check_checkpoint(folder: RunFolder, store: Store, stream: TextIO) -> None:
    """CheckpointError before a cluster is started, not after."""
    rows = [
        (row.checkpoint_path, row.checkpoint_hash)
        for row in store.committed_rounds()
        if row.checkpoint_path is not None and row.checkpoint_hash is not None
    ]
    if not rows:
        return
    found = newest_intact(folder.path / CHECKPOINTS, rows)
    if found != len(rows) - 1:
        newest, used = (Path(rows[i][0]).name for i in (-1, found))
        typer.echo(
            f"checkpoint {newest} is damaged or missing; going on from {used}, the rounds since "
            "then are learned again from the ledger",
            file=stream,
        )


def _run(folder: RunFolder, ledger: Ledger, store: Store, stream: TextIO) -> None:
    configure(folder.path)
    bind(run=folder.run_id)
    metrics = Metrics(folder.path)
    port = metrics.serve(folder.config.run.metrics_port)
    typer.echo(f"run {folder.run_id} in {folder.path}", file=stream)
    if port is not None:
        typer.echo(f"metrics at http://127.0.0.1:{port}/metrics", file=stream)
    watcher = MetricsWatcher(metrics, store.failures)
    progress = Several([open_progress(stream), watcher])
    store.set_run_status("running")
    reap_boxes(ledger)  # what a killed driver or runner left
    warm_start = RunParts.of(folder.config).warm_start()
    if not store.is_committed(WARM_START, 0):
        warm_start.write_ahead(WrittenLines(stream))
    try:
        with closing(_build(folder, ledger, stream)) as built:
            run_experiment(
                built.machine,
                warm_start=warm_start,
                step=built.step,
                progress=progress,
                run_dir=str(folder.path),
            )
    finally:
        with contextlib.suppress(LedgerError):  # then that is the run's error already
            watcher.ended()
        metrics.close()
        reap_boxes(ledger)


class Built(Protocol):
    """A machine and whatever it stands on."""

    @property
    def machine(self) -> RoundMachine: ...

    def step(self) -> RoundReport: ...

    def close(self) -> None: ...


def _build(folder: RunFolder, ledger: Ledger, stream: TextIO) -> Built:
    require_certified(folder.config)  # a task may have changed since the run was started
    if folder.config.backend == "local":
        from parl.rounds.local import build_local

        return InProcess(build_local(folder.config, folder.run_id, folder.path, ledger))
    from parl.rllib.build import build_ray

    return build_ray(
        folder.config,
        run_id=folder.run_id,
        run_dir=folder.path,
        ledger_url=folder.ledger_url,
        say=lambda line: typer.echo(line, file=stream),
        connected=_hear_signals,
    )


@dataclass(frozen=True, slots=True)
class InProcess:
    """``backend = "local"``: the machine is all there is."""

    machine: RoundMachine

    def step(self) -> RoundReport:
        return self.machine.step()

    def close(self) -> None:
        self.machine.close()


def reap_boxes(ledger: Ledger) -> None:
    """Remove sandboxes whose owner is dead; what cannot be removed keeps its lease (logged)."""
    LeaseBook(ledger).reap({LEASE_KIND: lambda lease: reap_box(lease.data_json)})


def _is_finished(store: Store) -> bool:
    """False also where the ledger does not answer: then that is the error."""
    with contextlib.suppress(LedgerError):
        return store.run_status() == FINISHED
    return False


def _note(store: Store, status: str, error: str) -> None:
    """The run row says how the run ended; a ledger that cannot be written is the error itself."""
    with contextlib.suppress(LedgerError):
        store.set_run_status(status, error)
