"""Record a task's cassettes: play the author's solution against the real APIs."""

from __future__ import annotations

from pathlib import Path

from sandbox.check.episodes import Played, open_stage
from sandbox.check.scripts import oracle_of
from sandbox.config import SandboxConfig
from sandbox.errors import TaskError
from sandbox.shelf import Leases
from sandbox.task import load_task


async def record_task(folder: Path, config: SandboxConfig, leases: Leases) -> Played:
    """One episode of the solution with mode record for every upstream that has a cassette; it
    appends to the cassettes, and what is equal replaces what was there.

    TaskError without ``config.allow_live``, without a solution or without anything to record.
    """
    if not config.allow_live:
        raise TaskError(f"{folder}: recording calls real APIs; set sandbox.allow_live = true")
    loaded = load_task(folder, record=True)
    if loaded.spec.proxy is None or "record" not in loaded.spec.proxy.modes.values():
        raise TaskError(
            f"{folder / 'task.toml'}: metadata.parl.proxy names no upstream with a cassette; there "
            "is nothing to record"
        )
    oracle = oracle_of(folder, loaded.spec)
    async with open_stage(loaded.spec, loaded.bundle, config, leases) as stage:
        return await stage.play(loaded.spec, oracle)
