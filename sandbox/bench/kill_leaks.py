"""Kill driver, worker and proxy, count what they leave: ``python -m sandbox.bench.kill_leaks``.

Each time a driver with a pool of boxes starts a worker with another one, and both play episodes
with tools in the box, in a simulator and in an MCP server behind the node's proxy. All leave
daemons, files and half-open calls. At a random moment, also while they still start, SIGKILL hits
one or two of them. Ten seconds later no process, cgroup, container, mount or directory of a dead
one may exist (facts/sandboxes.md 8); nobody reaps meanwhile. The leases name every box that ever
was, because each is written before its box. Then the rest is killed and looked for in the same way.

No episode may have been judged wrong: the agent answers right, and what a kill cost has no verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra.db.engine import Ledger, open_ledger
from infra.leases import LeaseBook
from infra.owners import is_dead, process_owner
from sandbox.backends.base import Level
from sandbox.backends.choice import open_backend
from sandbox.bench import kill_victim
from sandbox.bench.kill_left import Left, Tree, left_of
from sandbox.bench.kill_victim import control_socket, episodes_file, ledger_url, temporary
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable
from sandbox.shelf import LEASE_KIND

ROLES = ("driver", "worker", "proxy")
VICTIMS: tuple[tuple[str, ...], ...] = (
    ("driver",),
    ("proxy",),
    ("worker",),
    ("driver", "proxy"),
    ("worker", "proxy"),
    ("driver", "worker"),
)
WITHIN_S = 10.0
_LATE_S = 5.0
"""A container that is only being created may still appear."""
_STARTED_S = 180.0


@dataclass(frozen=True, slots=True)
class Kill:
    """One round: who is hit, at which isolation of the boxes, and when."""

    level: Level
    victims: tuple[str, ...]
    early: bool
    """While they still start; else after both have boxes and have judged an episode."""
    after_s: float


@dataclass(slots=True)
class Killed:
    """What one round showed."""

    left: Left
    left_of_all: Left
    """After the rest was killed too."""
    num_boxes: int = 0
    num_processes: int = 0
    gone_s: float = 0.0
    """Until nothing of the victims was left; at most about WITHIN_S."""
    num_right: int = 0
    num_null: int = 0
    """Episodes without a verdict."""
    num_null_after: int = 0
    """... that ended after the kill."""
    wrong: list[str] = field(default_factory=list)
    """Episodes that were judged and not right; there must be none."""

    @property
    def ok(self) -> bool:
        return not self.left and not self.left_of_all and not self.wrong


def draw_kills(times: int, levels: Sequence[Level], seed: int, until_s: float = 5.0) -> list[Kill]:
    """Every kind of victim in turn, at every level."""
    draw = random.Random(seed)
    return [
        Kill(
            level=levels[number % len(levels)],
            victims=VICTIMS[number // len(levels) % len(VICTIMS)],
            early=draw.random() < 0.25,
            after_s=draw.uniform(0.0, until_s),
        )
        for number in range(times)
    ]


def kill_once(kill: Kill, folder: Path) -> Killed:
    """Run one round in a folder of its own, which is empty and has a short path."""
    with _Round(kill, folder) as played:
        return played.run()


class _Round:
    """The three processes of a round; whatever happens, none outlives the block."""

    def __init__(self, kill: Kill, folder: Path) -> None:
        self._kill = kill
        self._folder = folder
        for role in ROLES:
            temporary(folder, role).mkdir()
        open_ledger(ledger_url(folder)).close()
        self._ledger: Ledger = open_ledger(ledger_url(folder))
        self._owners: dict[str, str] = {}
        self._processes: list[subprocess.Popen[str]] = []
        self._tree = Tree()

    def __enter__(self) -> _Round:
        config = self._folder / "proxy.toml"
        config.write_text(f"state_dir = {json.dumps(str(control_socket(self._folder).parent))}\n")
        self._start("proxy", ["sandbox.proxy", "--config", str(config)])
        driver = [kill_victim.__name__, "driver", self._kill.level.value, str(self._folder)]
        process = self._start("driver", driver)
        assert process.stdout is not None
        self._owners["worker"] = process.stdout.readline().strip()
        return self

    def __exit__(self, *_: object) -> None:
        for role in ROLES:
            self._signal(role, signal.SIGKILL)
        for process in self._processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._ledger.close()

    def _start(self, role: str, words: list[str]) -> subprocess.Popen[str]:
        environment = {**os.environ, "TMPDIR": str(temporary(self._folder, role))}
        # the log is for people: what a dying process says is not judged
        with (self._folder / f"{role}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._processes.append(process)
        self._owners[role] = process_owner(process.pid)
        return process

    def run(self) -> Killed:
        if not self._kill.early:
            self._wait_until_busy()
        time.sleep(self._kill.after_s)
        self._hit(self._kill.victims)
        at, begin = time.time(), time.monotonic()
        left, num_boxes = self._look(begin)
        found = Killed(left, Left(), num_boxes, len(self._tree.owners), time.monotonic() - begin)
        self._hit([role for role in ROLES if not is_dead(self._owners[role])])
        found.left_of_all, num_boxes = self._look(time.monotonic())
        found.num_boxes = max(found.num_boxes, num_boxes)
        self._count(found, at)
        return found

    def _wait_until_busy(self) -> None:
        """Until driver and worker have each judged an episode."""
        deadline = time.monotonic() + _STARTED_S
        waiting = {"driver", "worker"}
        while waiting:
            if time.monotonic() > deadline:
                ends = {role: _lines(self._folder, role)[-1:] for role in sorted(waiting)}
                raise TimeoutError(f"no verdict within {_STARTED_S:g} s: {ends}")
            waiting -= {
                r
                for r in waiting
                if any(line["end"] == "verified" for line in _lines(self._folder, r))
            }
            time.sleep(0.05)

    def _hit(self, victims: Sequence[str]) -> None:
        """Stop them, note what they started, kill them."""
        for role in victims:
            self._signal(role, signal.SIGSTOP)
        for role in victims:
            if not is_dead(self._owners[role]):
                self._tree.add(int(self._owners[role].split(":")[1]))
        for role in victims:
            self._signal(role, signal.SIGKILL)

    def _signal(self, role: str, number: signal.Signals) -> None:
        """It cannot hit another process with the same number."""
        owner = self._owners.get(role)
        if owner is None:
            return
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(int(owner.split(":")[1]))
            try:
                if not is_dead(owner):
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)

    def _look(self, begin: float) -> tuple[Left, int]:
        """Until nothing of the dead is left, at most WITHIN_S; (left, their boxes)."""
        book, count = LeaseBook(self._ledger), 0
        while True:
            # the worker ends with its driver
            dead = [role for role in ROLES if is_dead(self._owners[role])]
            footprints = [dict(row.data_json) for row in book.expired() if row.kind == LEASE_KIND]
            count = max(count, len(footprints))
            left = left_of(self._folder, dead, self._tree, footprints)
            if time.monotonic() - begin > WITHIN_S:
                return left, count
            if not left and time.monotonic() - begin > 1.0:
                if self._kill.level is Level.DOCKER:
                    time.sleep(max(0.0, begin + _LATE_S - time.monotonic()))
                return left_of(self._folder, dead, self._tree, footprints), count
            time.sleep(0.1)

    def _count(self, found: Killed, at: float) -> None:
        for role in ("driver", "worker"):
            for line in _lines(self._folder, role):
                if line["correctness"] is None:
                    found.num_null += 1
                    found.num_null_after += line["time"] > at
                elif line["correctness"] == 1.0:
                    found.num_right += 1
                else:
                    found.wrong.append(f"{role}: {line}")


def _lines(folder: Path, role: str) -> list[dict]:
    """Whole lines that a victim wrote."""
    path = episodes_file(folder, role)
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


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


@contextlib.contextmanager
def round_folder() -> Iterator[Path]:
    """Removed at the end, also when somebody asks this process to stop (``timeout`` does)."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with tempfile.TemporaryDirectory(prefix="parl-kill-", ignore_cleanup_errors=True) as name:
            yield Path(name)
    finally:
        signal.signal(signal.SIGTERM, before)


def run(times: int, levels: list[Level], seed: int, until_s: float) -> int:
    """Kill ``times`` times; print a line each; number of rounds that left something."""
    bad, slowest, boxes = 0, 0.0, 0
    for number, kill in enumerate(draw_kills(times, levels, seed, until_s), start=1):
        with round_folder() as folder:
            killed = kill_once(kill, folder)
        bad += not killed.ok
        slowest, boxes = max(slowest, killed.gone_s), boxes + killed.num_boxes
        sys.stdout.write(f"{number:3} {line_of(kill, killed)}\n")
        sys.stdout.flush()
    sys.stdout.write(
        f"{times} kills, {boxes} orphaned boxes, {bad} rounds left something or judged wrongly; "
        f"slowest {slowest:.1f} s\n"
    )
    return bad


def line_of(kill: Kill, killed: Killed) -> str:
    """One line of the report."""
    counts = [
        ", ".join(f"{value} {name}" for name, value in left.counts.items() if value) or "nothing"
        for left in (killed.left, killed.left_of_all)
    ]
    what = "".join(f"\n    {text}" for text in (*killed.left.processes, *killed.wrong))
    return (
        f"level {kill.level.value:6} {'+'.join(kill.victims):13} "
        f"{'early' if kill.early else 'busy '} {kill.after_s:4.1f} s, {killed.num_boxes} boxes, "
        f"{killed.num_processes} processes: {counts[0]} left ({killed.gone_s:.1f} s), at the end "
        f"{counts[1]}; {killed.num_right} right, {killed.num_null} null "
        f"({killed.num_null_after} after), {len(killed.wrong)} wrong{what}"
    )


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
