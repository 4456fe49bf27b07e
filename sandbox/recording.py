"""Record a task's cassettes: play one episode against the real APIs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from sandbox.check.episodes import Played, open_stage, play
from sandbox.check.scripts import Script, oracle_of
from sandbox.config import SandboxConfig
from sandbox.errors import TaskError
from sandbox.pool import SandboxPool, config_for
from sandbox.proxied import node_config
from sandbox.proxy.scrub import MARK
from sandbox.session import Session
from sandbox.shelf import Leases
from sandbox.task import TaskSpec, load_task


@dataclass(frozen=True, slots=True)
class Added:
    """What a recording appended to one cassette. ``calls``: by tool; ``scrubbed``: places where a
    secret was taken out, by tool ("(tools)" for what an MCP server says of them)."""

    path: Path
    calls: Counter[str] = field(default_factory=Counter)
    scrubbed: Counter[str] = field(default_factory=Counter)
    num_listings: int = 0

    @property
    def num_calls(self) -> int:
        return self.calls.total()


@dataclass(frozen=True, slots=True)
class Recorded:
    """``replayed``: the same episode from the cassettes alone, None where the manifest's own modes
    do not replay. ``failed``: where a recording that is not good was put instead of the
    cassettes."""

    played: Played
    added: tuple[Added, ...]
    replayed: Played | None = None
    failed: tuple[Path, ...] = ()

    @property
    def good(self) -> bool:
        """Whether the recording can stand for the API."""
        replays = self.replayed is None or (self.different is None and self.replayed.passed)
        return self.played.passed and replays

    @property
    def different(self) -> int | None:
        """Number (from 0) of the first call whose answer is another in replay; None: all equal."""
        if self.replayed is None:
            return None
        pairs = zip(self.played.observations, self.replayed.observations, strict=False)
        for number, (first, second) in enumerate(pairs):
            if (first.text, first.error) != (second.text, second.error):
                return number
        counts = len(self.played.observations), len(self.replayed.observations)
        return None if counts[0] == counts[1] else min(counts)


class Recording:
    """A task that is being recorded; made by ``open_recording``."""

    def __init__(self, spec: TaskSpec, pool: SandboxPool, sizes: dict[Path, int]) -> None:
        """``sizes``: bytes of the task's files before anything was recorded."""
        self.spec = spec
        self.failed: tuple[Path, ...] = ()
        self._pool = pool
        self._sizes = sizes
        self._kept = False

    async def session(self) -> Session:
        """An episode whose upstream calls are recorded."""
        return await self._pool.acquire(self.spec, owner="parl task record")

    def added(self) -> tuple[Added, ...]:
        """What the cassettes grew by since the recording was opened."""
        cassettes = _cassettes(self.spec)
        return tuple(_added(path, self._sizes.get(path.resolve(), 0)) for path in cassettes)

    def keep(self) -> None:
        """What was recorded is good and stays on the cassettes."""
        self._kept = True

    def settle(self) -> None:
        """Unless it is kept, take what was recorded off the cassettes again, into files beside
        them: half an episode would replace the equal records of a good one."""
        if not self._kept and not self.failed:
            found = (
                _taken_off(path, self._sizes.get(path.resolve())) for path in _cassettes(self.spec)
            )
            self.failed = tuple(path for path in found if path is not None)


@asynccontextmanager
async def open_recording(
    folder: Path, config: SandboxConfig, leases: Leases
) -> AsyncIterator[Recording]:
    """Mode record for every upstream that has a cassette; what is recorded is appended to the
    cassettes, and what is equal replaces what was there. The manifest stays as it is.

    What the caller does not ``keep`` is moved to NAME.failed.jsonl at the end, also after an error.
    TaskError without ``config.allow_live`` or without anything to record.
    """
    if not config.allow_live:
        raise TaskError(
            f"{folder}: recording calls real APIs; allow it with --allow-live "
            "(sandbox.allow_live = true)"
        )
    files = (path for path in folder.rglob("*") if path.is_file())
    sizes = {path.resolve(): path.stat().st_size for path in files}
    # its state directory is never made: the listing, which records too, has one of its own
    loaded = load_task(folder, record=node_config(config, folder / "proxy"))
    if loaded.spec.proxy is None or "record" not in loaded.spec.proxy.modes.values():
        raise TaskError(
            f"{folder / 'task.toml'}: metadata.parl.proxy names no upstream with a cassette; there "
            "is nothing to record"
        )
    pool = SandboxPool(loaded.bundle, size=1, leases=leases, config=config_for(loaded.spec, config))
    recording = Recording(loaded.spec, pool, sizes)
    try:
        await pool.start()
        yield recording
    finally:
        try:
            await pool.close()
        finally:
            recording.settle()


async def record_task(folder: Path, config: SandboxConfig, leases: Leases) -> Recorded:
    """Play the author's solution once against the real APIs, then from the cassettes alone.

    See ``open_recording``; TaskError also without a solution.
    """
    async with open_recording(folder, config, leases) as recording:
        oracle = oracle_of(folder, recording.spec)
        played = await play(await recording.session(), oracle)
        replayed = await _replayed(folder, config, leases, oracle)
        recorded = Recorded(played, recording.added(), replayed)
        if recorded.good:
            recording.keep()
    return replace(recorded, failed=recording.failed)


async def _replayed(
    folder: Path, config: SandboxConfig, leases: Leases, oracle: Script
) -> Played | None:
    loaded = load_task(folder)
    if loaded.spec.proxy is None or loaded.spec.proxy.live:
        return None
    offline = config.model_copy(update={"allow_live": False, "proxy_dir": None})
    async with open_stage(loaded.spec, loaded.bundle, offline, leases) as stage:
        return await stage.play(loaded.spec, oracle)


def _cassettes(spec: TaskSpec) -> list[Path]:
    assert spec.proxy is not None, "checked by open_recording"
    found = [upstream.cassette for upstream in spec.proxy.world.upstreams.values()]
    return sorted({path for path in found if path is not None})


def _taken_off(path: Path, size: int | None) -> Path | None:
    """Move what ``path`` holds beyond ``size`` bytes (None: no file then) to NAME.failed.jsonl;
    None when it did not grow."""
    if not path.exists() or path.stat().st_size <= (size or 0):
        return None
    beside = path.with_name(f"{path.stem}.failed.jsonl")
    with path.open("rb") as file:
        file.seek(size or 0)
        beside.write_bytes(file.read())
    beside.chmod(path.stat().st_mode & 0o777)
    if size is None:
        path.unlink()
    else:
        os.truncate(path, size)
    return beside


def _added(path: Path, size: int) -> Added:
    added = Added(path)
    if not path.exists():
        return added
    num_listings = 0
    with path.open("rb") as file:
        file.seek(size)
        for line in file:
            if not line.strip():  # closes a line that an earlier crash tore
                continue
            record = json.loads(line)
            tool = "(tools)" if record["kind"] == "tools" else _tool_of(record["request"])
            if record["kind"] == "tools":
                num_listings += 1
            else:
                added.calls[tool] += 1
            if found := line.count(MARK.encode()):
                added.scrubbed[tool] += found
    return Added(path, added.calls, added.scrubbed, num_listings)


def _tool_of(request: dict[str, object]) -> str:
    """A record names the request, as it was sent."""
    named = request.get("mcp") or request.get("python")
    return str(named or f"{request.get('method')} {request.get('path')}")
