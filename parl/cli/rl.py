"""``parl rl``: start, resume, watch and inspect reinforcement learning runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from parl.cli.runs import DEFAULT_PARENT

app = typer.Typer(no_args_is_help=True)

ConfigFiles = Annotated[
    list[Path],
    typer.Option("--config", "-c", help="TOML file; given twice, the later one wins."),
]
Overrides = Annotated[
    list[str], typer.Option("--set", "-s", help="One value: rounds.num_rounds=3. Wins most.")
]
RunsDir = Annotated[Path, typer.Option("--dir", help="Parent of run folders.")]
RunName = Annotated[str, typer.Argument(help="Run id or path of its folder.")]
LatestRun = Annotated[
    str | None, typer.Argument(help="Run id or path; without it the run started last.")
]


@app.command("run")
def run(
    config: ConfigFiles,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default, nobody writes to it
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration as TOML and stop.")
    ] = False,
) -> None:
    """Train: warm start, evaluate, RL rounds, evaluate, report."""
    from parl.cli.runs import public_toml, resolve

    resolved = resolve(config, overrides)
    if dry_run:
        typer.echo(public_toml(resolved), nl=False)
        return
    from parl.cli.runs import create_run, require_sandbox

    require_sandbox(resolved)
    folder = create_run(resolved)  # a ledger that cannot be written shows before torch is loaded
    from parl.cli.launch import drive

    drive(folder, sys.stdout)


@app.command("resume")
def resume(run_name: RunName, runs_dir: RunsDir = DEFAULT_PARENT) -> None:
    """Go on where the ledger says the run is; a finished run only writes its report again."""
    from parl.cli.launch import drive
    from parl.cli.runs import find_run

    drive(find_run(run_name, runs_dir), sys.stdout)


@app.command("list")
def list_all(runs_dir: RunsDir = DEFAULT_PARENT) -> None:
    """Run folders, the oldest first."""
    from infra.errors import ConfigError, ParlError
    from parl.cli.runs import find_run, list_runs, status_now
    from parl.report.history import read_history

    if not runs_dir.is_dir() and runs_dir != DEFAULT_PARENT:
        raise ConfigError(f"--dir {runs_dir}: no such folder; say where run folders are")
    paths = list_runs(runs_dir)
    if not paths:
        typer.echo(f"no runs in {runs_dir}/ yet")
    for path in paths:
        try:
            folder = find_run(str(path), runs_dir)
            history = read_history(folder.open_ledger(), folder.run_id)
        except ParlError as error:  # one damaged run must not hide the others
            typer.echo(f"{path}  unreadable: {error}")
            continue
        status = status_now(folder, history.status)
        typer.echo(f"{path}  {status}  {len(history.rounds)}/{history.num_rounds} rounds")


@app.command("status")
def status(run_name: LatestRun = None, runs_dir: RunsDir = DEFAULT_PARENT) -> None:
    """Rounds, success, tokens per solved task, gates, time left, episodes by state."""
    from parl.cli.runs import find_run, status_now
    from parl.report.history import read_history
    from parl.report.status import status_text

    folder = find_run(run_name, runs_dir)
    history = read_history(folder.open_ledger(), folder.run_id)
    typer.echo(status_text(history, status_now(folder, history.status)))


@app.command("show")
def show(
    episode: Annotated[
        str, typer.Argument(help="Episode id, or ROUND/TASK/SAMPLE, or PHASE/ROUND/TASK/SAMPLE.")
    ],
    run_name: Annotated[
        str | None, typer.Option("--run", help="Run id or path; default: from the id, or latest.")
    ] = None,
    runs_dir: RunsDir = DEFAULT_PARENT,
) -> None:
    """One episode, complete from the ledger: tokens, masks, calls, rewards, versions, draws."""
    from parl.cli.runs import find_run, list_runs
    from parl.cli.tokens import token_text
    from parl.cli.visible import visible
    from parl.report.episode import episode_text, read_episode

    if run_name is None and episode.partition("/")[0] in {p.name for p in list_runs(runs_dir)}:
        run_name = episode.partition("/")[0]
    folder = find_run(run_name, runs_dir)
    record = read_episode(folder.open_ledger(), folder.run_id, episode)
    typer.echo(visible(episode_text(record, token_text(folder.config))))


@app.command("report")
def report(run_name: LatestRun = None, runs_dir: RunsDir = DEFAULT_PARENT) -> None:
    """Write report.md, curves.png and table.txt again, from the ledger."""
    from parl.cli.runs import find_run
    from parl.report.write import write_report

    folder = find_run(run_name, runs_dir)
    files = write_report(folder.open_ledger(), folder.run_id, folder.path)
    typer.echo(f"{files.text}\n{files.report}" if files.text else str(files.report))


@app.command("rescore")
def rescore_run(run_name: LatestRun = None, runs_dir: RunsDir = DEFAULT_PARENT) -> None:
    """Compute every reward again from the ledger and compare; exit 1 when one differs."""
    from parl.cli.runs import find_run
    from parl.errors import RunError
    from parl.report.rescore import rescore

    folder = find_run(run_name, runs_dir)
    result = rescore(folder.open_ledger(), folder.run_id, folder.config.reward)
    if result.num_rounds == 0:
        raise RunError(f"run {folder.run_id} has no committed round yet: nothing to compute again")
    for line in result.differences[:20]:
        typer.echo(line)
    typer.echo(
        f"{result.num_episodes} rewards of {result.num_rounds} rounds computed again, "
        f"{len(result.differences)} differ"
    )
    if result.differences:
        raise typer.Exit(1)


@app.command("submit")
def submit(
    config: ConfigFiles,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default, nobody writes to it
    address: Annotated[
        str, typer.Option(help="Dashboard of the head node; default RAY_API_SERVER_ADDRESS.")
    ] = "",
    token: Annotated[
        str, typer.Option("--auth-token", help="File with the cluster's token; default as Ray's.")
    ] = "",
    python: Annotated[
        str, typer.Option(help="Interpreter on the cluster; default: ours if it is this machine.")
    ] = "",
) -> None:
    """`parl rl run` as a Ray job: wait for it, show its log, end with its exit code."""
    from parl.cli.submit import submit_run

    code = submit_run(config, overrides, address=address, token=token, python=python)
    if code != 0:
        raise typer.Exit(code)
