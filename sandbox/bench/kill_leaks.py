"""Kill owners of boxes, count what they leave: ``python -m sandbox.bench.kill_leaks --times 20``.

Each time a driver with a pool of boxes starts a worker with another one; both play episodes that
leave daemons, files and half-open calls. At a random moment, also while they still start, SIGKILL
hits the driver, the worker or both. Ten seconds later no process, cgroup, container, mount or
directory of any of their boxes may exist (facts/sandboxes.md 8); nobody reaps meanwhile. The leases
name every box that ever was, because each is written before its box.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from infra.db.engine import open_ledger
from infra.leases import LeaseBook
from sandbox.backends.base import Level
from sandbox.backends.choice import open_backend
from sandbox.backends.processes import marked_processes
from sandbox.bench import kill_victim
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable
from sandbox.shelf import LEASE_KIND

VICTIMS = ("driver", "worker", "both")
WITHIN_S = 10.0
_STARTED_S = 30.0


@dataclass(slots=True)
class Left:
    """What exists of some boxes."""

    processes: list[int] = field(default_factory=list)
    cgroups: list[str] = field(default_factory=list)
    containers: list[str] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)
    directories: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """By kind."""
        return {name: len(getattr(self, name)) for name in self.__slots__}


def left_of(footprints: list[dict]) -> Left:
    """Everything on this machine that belongs to the boxes of these leases."""
    left = Left()
    mountinfo = Path("/proc/self/mountinfo").read_text()
    for data in footprints:
        box_id = data["box_id"]
        left.processes += marked_processes(box_id)
        left.cgroups += [path for path in data["cgroups"] if Path(path).exists()]
        left.directories += [path for path in data["directories"] if Path(path).exists()]
        left.mounts += [line for line in mountinfo.splitlines() if box_id in line]
        if names := data.get("containers"):
            left.containers += list(_containers(names))
    return left


def _containers(names: list[str]) -> Iterator[str]:
    from sandbox.backends.docker_engine import connected

    with connected() as client:
        for found in client.api.containers(all=True, filters={"name": names}):
            yield found["Names"][0]


def kill_once(
    level: Level, victim: str, early: bool, after_s: float, directory: Path
) -> tuple[Left, int, float]:
    """One round: (what is left, boxes that existed at the kill, seconds until nothing was)."""
    url = f"sqlite:///{directory}/ledger.db"
    open_ledger(url).close()
    command = [sys.executable, "-m", kill_victim.__name__, "driver", level.value, url]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    assert driver.stdout is not None
    try:
        pids = json.loads(driver.stdout.readline())
        ledger = open_ledger(url)
        if not early:
            _both_own_boxes(LeaseBook(ledger))
        time.sleep(after_s)
        worker = kill_victim.Handle(pids["worker"])
        if victim in ("worker", "both"):
            worker.kill()
        if victim in ("driver", "both"):
            driver.kill()
        begin = time.monotonic()
        left, count = _wait(LeaseBook(ledger), begin)
        gone_s = time.monotonic() - begin
        ledger.close()
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    return left, count, gone_s


def _both_own_boxes(book: LeaseBook) -> None:
    """Wait until driver and worker have a box each."""
    deadline = time.monotonic() + _STARTED_S
    while time.monotonic() < deadline:
        # a far moment: every lease counts as expired then
        rows = book.expired(now=time.time() + 1e6)
        if len({row.owner for row in rows if row.kind == LEASE_KIND}) > 1:
            return
        time.sleep(0.05)


def _wait(book: LeaseBook, begin: float) -> tuple[Left, int]:
    """Until nothing is left of the dead owners' boxes, at most WITHIN_S."""
    count = 0
    while True:
        footprints = [dict(row.data_json) for row in book.expired() if row.kind == LEASE_KIND]
        count = max(count, len(footprints))
        left = left_of(footprints)
        if time.monotonic() - begin > WITHIN_S:
            return left, count
        if not any(left.counts.values()) and time.monotonic() - begin > 1.0:
            # a container that is only being created may still appear
            time.sleep(max(0.0, begin + 5.0 - time.monotonic()))
            return left_of(footprints), count
        time.sleep(0.1)


def usable(levels: list[str]) -> list[Level]:
    """Those that work here; a line for each other one."""
    found = []
    for name in levels:
        level = Level(name)
        try:
            open_backend(level, SandboxConfig())
        except BackendUnavailable as error:
            sys.stdout.write(f"level {name} skipped: {error}\n")
        else:
            found.append(level)
    return found


def run(times: int, levels: list[Level], seed: int, until_s: float) -> int:
    """Kill ``times`` times; print a line each; number of rounds that left something."""
    draw = random.Random(seed)
    bad, slowest, boxes = 0, 0.0, 0
    for number in range(times):
        level, victim = levels[number % len(levels)], draw.choice(VICTIMS)
        early = draw.random() < 0.25  # while they still start
        after_s = draw.uniform(0.0, until_s)
        with tempfile.TemporaryDirectory(prefix="parl-kill-") as directory:
            left, count, gone_s = kill_once(level, victim, early, after_s, Path(directory))
        bad += any(left.counts.values())
        slowest, boxes = max(slowest, gone_s), boxes + count
        counts = ", ".join(f"{value} {name}" for name, value in left.counts.items())
        sys.stdout.write(
            f"{number + 1:3} level {level.value:6} {victim:6} "
            f"{'early' if early else 'busy '} {after_s:4.1f} s, "
            f"{count} boxes: {counts} left ({gone_s:.1f} s)\n"
        )
        sys.stdout.flush()
    sys.stdout.write(
        f"{times} kills, {boxes} orphaned boxes, {bad} rounds left something; "
        f"slowest {slowest:.1f} s\n"
    )
    return bad


def main() -> None:
    """Exit 1 when anything is left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--levels", nargs="+", default=["A", "docker"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--until-s", type=float, default=5.0, help="latest moment of a kill")
    options = parser.parse_args()
    levels = usable(options.levels)
    if not levels:
        raise SystemExit("no level to test works here")
    if run(options.times, levels, options.seed, options.until_s):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
