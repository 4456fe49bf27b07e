"""Run folders: make one, find one by id or path, open its ledger, be its only driver."""

from __future__ import annotations

import difflib
import fcntl
import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.errors import ConfigError, LedgerError

if TYPE_CHECKING:
    from infra.db.engine import Ledger
    from parl.config import RunConfig
    from parl.store.store import Store

DEFAULT_PARENT = Path("runs")
"""Where commands look for runs unless told."""
CONFIG_FILE = "config.toml"
LEDGER_FILE = "ledger.db"
LOCK_FILE = "driver.lock"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run that was started. ``run_id`` is the folder's name."""

    path: Path
    config: RunConfig

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def ledger_url(self) -> str:
        return self.config.run.ledger or f"sqlite:///{self.path / LEDGER_FILE}"

    def open_ledger(self) -> Ledger:
        """The existing ledger; LedgerError when it is gone or knows another run by this folder."""
        from sqlalchemy import select

        from infra.db.engine import open_ledger
        from infra.db.models import RunRow

        ledger = open_ledger(self.ledger_url, create=False, durable=self.config.run.durable)
        with ledger.session() as session:
            found = session.get(RunRow, self.run_id) is not None
            known = list(session.scalars(select(RunRow.id).order_by(RunRow.created_at).limit(10)))
        if not found:
            raise LedgerError(
                f"the ledger of {self.path} holds {', '.join(known) or 'no run'} and no run "
                f"{self.run_id!r}; a run has the name of its folder: rename the folder back"
            )
        return ledger


def resolve(files: Sequence[Path], overrides: Sequence[str]) -> RunConfig:
    """The configuration of a new run, checked as far as it can be before anything exists.

    ConfigError or TaskError: wrong keys and values, unknown family or task type, a vocabulary that
    does not fit the model.
    """
    from infra.config import load_config
    from infra.db.engine import parse_url
    from parl.config import RunConfig
    from parl.rounds.certified import require_certified
    from parl.rounds.parts import RunParts

    config = load_config(RunConfig, files, overrides)
    if config.run.ledger:
        parse_url(config.run.ledger)
    RunParts.of(config)
    proxy_file = Path(config.sandbox.proxy_file)
    if config.sandbox.proxy_file and not config.ray.address and not proxy_file.is_file():
        raise ConfigError(
            f"sandbox.proxy_file = {config.sandbox.proxy_file!r}: no such file; expected the "
            "operator's proxy.toml (docs/proxy.md)"
        )
    require_certified(config)
    return config


def require_sandbox(config: RunConfig) -> None:
    """BackendUnavailable when boxes of this run cannot be made on this machine. A cluster
    elsewhere makes its own; its runners will say."""
    if config.backend == "ray" and config.ray.address:
        return
    from parl.rounds.parts import sandbox_config
    from sandbox.backends.choice import choose_backend

    choose_backend(sandbox_config(config))


def create_run(config: RunConfig) -> RunFolder:
    """A new folder ``<run.dir>/<run.name>-<number>`` with config.toml, and the run's ledger row.

    ConfigError when the folder cannot be made; LedgerError when the ledger cannot be written (the
    folder is removed again then: nothing has happened yet).
    """
    import shutil

    from infra.config import config_hash, dump_toml
    from infra.db.engine import open_ledger
    from parl.rounds.certified import record_certificates, require_certified
    from parl.store.store import Store

    certified = require_certified(config)
    try:
        path = _new_folder(Path(config.run.dir), config.run.name)
        file = path / CONFIG_FILE
        file.touch(mode=0o600)  # a ledger URL may hold a password
        file.write_text(dump_toml(config), encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"run.dir = {config.run.dir!r}: {reason}; expected a folder we may write"
        ) from error
    folder = RunFolder(path.resolve(), config)
    try:
        ledger = open_ledger(folder.ledger_url, durable=config.run.durable)
        Store(ledger, folder.run_id).create_run(
            name=config.run.name,
            kind="rl",
            seed=config.run.seed,
            config=public_values(config),
            config_hash=config_hash(config),
            code_commit=code_commit(),
            run_dir=str(folder.path),
        )
        record_certificates(ledger, certified)
    except BaseException:
        shutil.rmtree(path)
        raise
    return folder


def public_values(config: RunConfig) -> dict[str, Any]:
    """All values as JSON types; a password in the ledger's URL is hidden."""
    return _without_password(config).model_dump(mode="json")


def public_toml(config: RunConfig) -> str:
    """``dump_toml`` for eyes: a password in the ledger's URL is hidden."""
    from infra.config import dump_toml

    return dump_toml(_without_password(config))


def _without_password(config: RunConfig) -> RunConfig:
    from infra.db.engine import shown_url

    run = config.run.model_copy(update={"ledger": shown_url(config.run.ledger)})
    return config.model_copy(update={"run": run})


MAY_CHANGE = (
    "run.durable",
    "run.metrics_port",
    "run.ledger",
    "rounds.keep_checkpoints",
    "sandbox.pool_size",
    "sandbox.proxy_socket",
    "sandbox.proxy_file",
    "ray.address",
    "ray.num_cpus",
    "ray.num_runners",
    "ray.cpus_per_runner",
    "ray.cpus_per_engine",
)
"""Where a run is, and on what; nothing here changes what it computes."""


def require_unedited(folder: RunFolder, store: Store) -> None:
    """ConfigError when config.toml no longer says what the run began with: its rounds would be of
    two experiments, and the ledger would tell of one. ``MAY_CHANGE`` may."""
    from infra.config import flat

    began = flat(store.load_run().config)
    now = flat(public_values(folder.config))
    # a key that only one side has came or went with a version of PARL
    changed = [
        f"{key}: {began[key]!r} -> {value!r}"
        for key, value in now.items()
        if key in began and began[key] != value and key not in MAY_CHANGE
    ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ConfigError(
            f"{folder.path / CONFIG_FILE} was edited since the run began "
            f"({'; '.join(changed[:3])}{more}); put it back, or start a new run with these values"
        )


def _new_folder(parent: Path, name: str) -> Path:
    """The first free number; two starting at once get two numbers."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = parent / f"{name}-{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            continue  # the number is taken
        return path
    raise AssertionError("unreachable: itertools.count does not end")


@contextmanager
def sole_driver(folder: RunFolder) -> Iterator[None]:
    """Hold the run's lock; the kernel frees it when this process ends, however it ends.

    RunError when another process drives the run: two would commit into each other's rounds.
    """
    from parl.errors import RunError

    with (folder.path / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunError(
                f"run {folder.run_id} is driven by process {file.read().strip() or '?'} already; "
                "wait for it or stop it, then resume"
            ) from None
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def driver_of(folder: RunFolder) -> str | None:
    """Process number of the run's living driver; None when nobody on this machine drives it."""
    lock = folder.path / LOCK_FILE
    if not lock.exists():
        return None
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "?"
    return None


def status_now(folder: RunFolder, status: str) -> str:
    """``status`` as the ledger has it, unless it says running and the driver is dead: a killed
    process cannot write that it was."""
    never_driven = not (folder.path / LOCK_FILE).exists()
    if status != "running" or never_driven or driver_of(folder) is not None:
        return status
    return f"stopped (its driver is gone; go on with: parl rl resume {shortest(folder)})"


def shortest(folder: RunFolder) -> str:
    """The id when the run is where `parl rl resume` looks by itself, else the path."""
    return folder.run_id if folder.path.parent == DEFAULT_PARENT.resolve() else str(folder.path)


def code_commit() -> str:
    """HEAD of the checkout this code runs from; empty for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def find_run(reference: str | None, parent: Path) -> RunFolder:
    """The run of an id below ``parent``, of a path, or (None) the one started last.

    ConfigError (exit 2) names the known and the nearest run.
    """
    from infra.config import load_config
    from parl.config import RunConfig

    path = _locate(reference, parent)
    return RunFolder(path.resolve(), load_config(RunConfig, [path / CONFIG_FILE]))


def list_runs(parent: Path) -> list[Path]:
    """Run folders below ``parent``, the oldest first."""
    if not parent.is_dir():
        return []
    found = [path for path in parent.iterdir() if (path / CONFIG_FILE).is_file()]
    return sorted(found, key=lambda path: (path / CONFIG_FILE).stat().st_mtime)


def _locate(reference: str | None, parent: Path) -> Path:
    runs = list_runs(parent)
    if reference is None:
        if not runs:
            raise ConfigError(
                f"no run in {parent}/; start one with `parl rl run --config configs/demo.toml`, "
                "or say where runs are with --dir"
            )
        return runs[-1]
    for candidate in (parent / reference, Path(reference)):
        if (candidate / CONFIG_FILE).is_file():
            return candidate
    names = [path.name for path in runs]
    near = difflib.get_close_matches(Path(reference).name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    where = f"{parent}/" if parent.is_dir() else f"{parent}/ (no such folder)"
    raise ConfigError(
        f"no run {reference!r} in {where}; a run folder holds {CONFIG_FILE}; "
        f"known: {', '.join(names) or 'none'}{hint}"
    )
