"""``parl task run``: one episode with the oracle, with nobody, by hand, or with a run's policy."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from parl.cli.boxes import Backend, BaseImages, SettingsFile, boxes
from parl.cli.live import AllowLive, ProxyFile, live
from parl.cli.visible import visible

if TYPE_CHECKING:
    from sandbox.check.scripts import Script
    from sandbox.config import SandboxConfig
    from sandbox.session import Observation, Session, Verdict
    from sandbox.task import TaskSpec, ToolBundle

AGENTS = ("oracle", "nop", "shell", "engine")
FORMS = (
    'a line is {"name": "TOOL", "arguments": {...}}, {"calls": [{"name": ...}, ...]} for several '
    'calls, or {"final_text": "..."} to answer'
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What to run. ``oracle`` is only called for the oracle agent; ``notes``: what the boxes do not
    give the task; ``imaged``: the task brings an image."""

    spec: TaskSpec
    bundle: ToolBundle
    oracle: Callable[[], Script]
    notes: tuple[str, ...] = ()
    imaged: bool = False


def run(
    target: Annotated[str, typer.Argument(help="Task folder, or family/type of the catalog.")],
    agent: Annotated[str, typer.Option("--agent", "-a", help=" | ".join(AGENTS))] = "oracle",
    run_name: Annotated[
        str | None, typer.Option("--run", help="Run whose weights play (agent engine).")
    ] = None,
    runs_dir: Annotated[Path, typer.Option("--dir", help="Parent of run folders.")] = Path("runs"),
    seed: Annotated[int, typer.Option(help="Of a shipped family's instance.")] = 0,
    index: Annotated[int, typer.Option(min=0, help="Of a shipped family's instance.")] = 0,
    backend: Backend = "auto",
    base_images: BaseImages = None,
    sandbox: SettingsFile = None,
    allow_live: AllowLive = False,
    proxy_file: ProxyFile = None,
) -> None:
    """Play one episode and print its verdict; exit 0 when it passes."""
    from infra.errors import ConfigError

    if agent not in AGENTS:
        raise ConfigError(f"--agent {agent!r}: expected one of {', '.join(AGENTS)}")
    config = boxes(backend, base_images, sandbox)
    config = live(config, allow_live, proxy_file, Path(target))
    chosen = choose(target, seed, index, config)
    if agent == "engine":
        from parl.cli.task_engine import run_engine

        if backend != "auto" or sandbox is not None or allow_live or proxy_file is not None:
            raise ConfigError(
                "--backend, --allow-live, --proxy: agent engine plays in the boxes of its run's "
                "config"
            )
        say_backend(chosen, "of the run")
        verdict = run_engine(chosen.spec, chosen.bundle, run_name, runs_dir, typer.echo)
    else:
        verdict = asyncio.run(_play(chosen, agent, config))
    print_verdict(verdict)
    if not verdict.passed:
        raise typer.Exit(1)


def choose(target: str, seed: int, index: int, config: SandboxConfig) -> Chosen:
    """TaskError when ``target`` is neither a task folder nor a shipped task, or cannot be loaded
    for the boxes of ``config`` (sandbox.imaged)."""
    from sandbox.check.scripts import Script, oracle_of
    from sandbox.imaged import has_image, load_for

    folder = Path(target)
    if folder.is_dir():
        loaded = load_for(folder, config)
        return Chosen(
            loaded.spec,
            loaded.bundle,
            lambda: oracle_of(folder, loaded.spec),
            loaded.notes,
            has_image(folder),
        )
    from parl.cli.shipped import find_task

    family, task_type = find_task(target)
    spec = family.instance(seed, index, "train", task_type)

    def oracle() -> Script:
        found = family.oracle(spec)
        return Script("oracle", found.rounds, found.final_text)

    return Chosen(spec, family.bundle, oracle)


def say_backend(chosen: Chosen, level: str) -> None:
    """Which boxes play, and in one line all that they do not give the task."""
    lost = "; ".join(chosen.notes)
    if chosen.bundle.image is not None:
        typer.echo(f"backend {level}, image {chosen.bundle.image.reference}: {lost}", err=True)
    elif chosen.imaged:
        typer.echo(
            f"backend {level} and not the task's image (--backend docker runs that); "
            f"downgrades: {lost}",
            err=True,
        )
    elif lost:
        typer.echo(f"backend {level}; downgrades: {lost}", err=True)


async def _play(chosen: Chosen, agent: str, config: SandboxConfig) -> Verdict:
    from sandbox.fakes import MemoryLeases
    from sandbox.pool import SandboxPool, config_for

    pool = SandboxPool(
        chosen.bundle,
        size=1,
        leases=MemoryLeases(),
        config=config_for(chosen.spec, config),
    )
    say_backend(chosen, pool.level.value)
    await pool.start()
    try:
        session = await pool.acquire(chosen.spec, owner=f"parl task run --agent {agent}")
        try:
            first = await session.start()
            typer.echo(first.text)
            if first.stop is not None:
                return await session.verify("")
            if agent == "shell":
                return await play_by_hand(session, chosen.spec, sys.stdin)
            script = None if agent == "nop" else chosen.oracle()
            return await _scripted(session, script)
        finally:
            await session.close()
    finally:
        await pool.close()


async def _scripted(session: Session, script: Script | None) -> Verdict:
    if script is None:
        return await session.verify("")
    for calls in script.rounds:
        for call in calls:
            typer.echo(f"> {call.name_text} {call.arguments_text}")
            seen = await session.call(call)
            print_observation(seen)
            if seen.stop is not None:
                return await session.verify(script.final_text)
    typer.echo(f"answer: {script.final_text}")
    return await session.verify(script.final_text)


async def play_by_hand(session: Session, spec: TaskSpec, lines: TextIO) -> Verdict:
    """A person's episode; a line is what a line of ``solution/calls.jsonl`` is."""
    for tool in spec.tools:
        typer.echo(f"tool {tool.name}: {tool.description}")
        typer.echo(f"     {json.dumps(tool.schema, ensure_ascii=False)}")
    typer.echo(FORMS)
    while True:
        if lines.isatty():
            typer.echo("parl> ", nl=False)
        line = await asyncio.to_thread(lines.readline)
        if not line:
            typer.echo("end of input: verified without an answer", err=True)
            return await session.verify("")
        if not line.strip():
            continue
        entry = _entry(line)
        if isinstance(entry, str):
            typer.echo(entry, err=True)
        elif "final_text" in entry:
            return await session.verify(str(entry["final_text"]))
        else:
            for call in entry.get("calls", [entry]):
                seen = await session.call(_raw(call))
                print_observation(seen)
                if seen.stop is not None:
                    return await session.verify("")


def _entry(line: str) -> dict[str, Any] | str:
    """The object a person typed, or what is wrong with it and what a line must be."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error}); {FORMS}"
    if not isinstance(entry, dict):
        return f"not a JSON object; {FORMS}"
    if "final_text" in entry:
        return entry
    calls = entry.get("calls", [entry])
    if isinstance(calls, list) and calls and all(_is_call(call) for call in calls):
        return entry
    return f"neither calls nor an answer; {FORMS}"


def _is_call(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str)


def _raw(entry: dict[str, Any]):
    from sandbox.session import RawCall

    arguments = entry.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return RawCall(str(entry["name"]), text)


def print_observation(seen: Observation) -> None:
    """What the model would read, and what the session noted about the call."""
    typer.echo(visible(seen.text))
    noted = [f"repaired: {', '.join(seen.repairs)}"] if seen.repairs else []
    noted += [f"loop: {seen.loop}"] if seen.loop else []
    noted += [f"stopped: {seen.stop.value}"] if seen.stop else []
    if noted:
        typer.echo(f"[{'; '.join(noted)}]")


def print_verdict(verdict: Verdict) -> None:
    """One line a fact."""
    typer.echo(f"verdict      {'pass' if verdict.passed else 'fail'}")
    typer.echo(f"correctness  {'none' if verdict.correctness is None else verdict.correctness:}")
    for reason in verdict.reasons:
        typer.echo(f"reason       {visible(reason)}")
    if verdict.error is not None:
        typer.echo(f"error        {visible(verdict.error)}")
