"""``parl task record``: one episode against the real APIs, for the cassettes that replay it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parl.cli.live import AllowLive, ProxyFile, UnsafeLocal, live

if TYPE_CHECKING:
    from sandbox.check.episodes import Played
    from sandbox.config import SandboxConfig
    from sandbox.recording import Added, Recorded
    from sandbox.session import Verdict

AGENTS = ("oracle", "shell")


def record(
    folder: Annotated[Path, typer.Argument(help="Task folder with proxied tools.")],
    agent: Annotated[
        str, typer.Option("--agent", "-a", help="oracle (the solution) | shell (you).")
    ] = "oracle",
    allow_live: AllowLive = False,
    proxy_file: ProxyFile = None,
    unsafe_local: UnsafeLocal = False,
) -> None:
    """Play an episode with every cassette in mode record, then replay it offline; exit 0 when the
    episode passes and replays."""
    from infra.errors import ConfigError
    from sandbox.config import SandboxConfig
    from sandbox.errors import TaskError

    if agent not in AGENTS:
        raise ConfigError(f"--agent {agent!r}: expected one of {', '.join(AGENTS)}")
    if not (folder / "task.toml").is_file():
        raise TaskError(f"{folder}: no task.toml; `parl task new` makes a task folder")
    config = live(SandboxConfig(unsafe_local=unsafe_local), allow_live, proxy_file, folder)
    if agent == "shell":
        verdict, added, failed = asyncio.run(_by_hand(folder, config))
        _say_added(folder, added, failed)
        good = verdict.passed
    else:
        recorded = asyncio.run(_by_oracle(folder, config))
        _say_added(folder, recorded.added, recorded.failed)
        _say_replay(recorded)
        good = recorded.good
    if not good:
        raise typer.Exit(1)
    typer.echo(f"check it with: parl task check {folder}")


async def _by_oracle(folder: Path, config: SandboxConfig) -> Recorded:
    from parl.cli.task_run import print_observation, print_verdict
    from sandbox.fakes import MemoryLeases
    from sandbox.recording import record_task

    recorded = await record_task(folder, config, MemoryLeases())
    for seen in recorded.played.observations:
        print_observation(seen)
    print_verdict(recorded.played.verdict)
    return recorded


async def _by_hand(
    folder: Path, config: SandboxConfig
) -> tuple[Verdict, tuple[Added, ...], tuple[Path, ...]]:
    from parl.cli.task_run import play_by_hand, print_verdict
    from sandbox.fakes import MemoryLeases
    from sandbox.recording import open_recording

    async with open_recording(folder, config, MemoryLeases()) as recording:
        session = await recording.session()
        try:
            first = await session.start()
            typer.echo(first.text)
            if first.stop is not None:
                verdict = await session.verify("")
            else:
                verdict = await play_by_hand(session, recording.spec, sys.stdin)
        finally:
            await session.close()
        print_verdict(verdict)
        added = recording.added()
        if verdict.passed:
            recording.keep()
    return verdict, added, recording.failed


def _say_added(folder: Path, added: tuple[Added, ...], failed: tuple[Path, ...]) -> None:
    """What is on the cassettes now; of a recording that is not kept, where it went."""
    for path in failed:
        name = path.resolve().relative_to(folder.resolve())
        typer.echo(f"not kept: the cassette is as it was before; this recording is in {name}")
    for each in () if failed else added:
        name = each.path.resolve().relative_to(folder.resolve())
        calls = ", ".join(f"{tool} {count}" for tool, count in sorted(each.calls.items()))
        told = f" ({calls})" if calls else ""
        typer.echo(f"calls recorded in {name}: {each.num_calls}{told}")
        if each.num_listings:
            typer.echo(f"lists of tools recorded in {name}: {each.num_listings}")
        places = ", ".join(f"{tool} {count}" for tool, count in sorted(each.scrubbed.items()))
        told = f" ({places})" if places else ", no secret came back"
        typer.echo(f"secrets scrubbed in {name}: {each.scrubbed.total()}{told}")


def _say_replay(recorded: Recorded) -> None:
    """Why the recording can stand for the API, or not."""
    failure = _first_failure(recorded.played)
    if not recorded.played.passed:
        typer.echo(f"the episode fails: mend it and record again{failure}")
    elif recorded.replayed is None:
        typer.echo("not replayed: a tool of the manifest has a mode that reaches its API")
    elif not recorded.good:
        number = recorded.different
        at = "" if number is None else f" from call {number + 1} on"
        advice = failure or "; declare the effects of the tools, then record again"
        typer.echo(f"replay differs{at}{advice}")
    else:
        typer.echo(f"calls replayed offline: {len(recorded.replayed.observations)}, all equal")


def _first_failure(played: Played) -> str:
    """The first call that failed at its API or before it, or nothing."""
    for number, seen in enumerate(played.observations, start=1):
        if seen.error is not None:
            words = " ".join(seen.text.split())[:200]
            return f"; call {number} ({seen.tool or 'no tool'}) failed: {seen.error}: {words}"
    return ""
