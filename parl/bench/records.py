"""Evidence that survives interruption: one JSON file, one record an item, written as it is made."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Item:
    """Something to show. ``measure`` returns the data; data["ok"] says whether it holds."""

    name: str
    measure: Callable[[], dict[str, Any]]


class Records:
    """name -> {commit, started_at, seconds, machine, ok, ...data}; the file is always whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[str, dict[str, Any]] = {}
        if path.is_file():
            self._records = json.loads(path.read_text(encoding="utf-8"))["records"]

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def get(self, name: str) -> dict[str, Any]:
        return self._records[name]

    def run(self, item: Item) -> dict[str, Any]:
        """Measure now and keep the result. An error of the measurement is raised, not recorded."""
        started = time.time()
        data = item.measure()
        assert isinstance(data.get("ok"), bool), f"{item.name}: no verdict in {sorted(data)}"
        record = {
            "commit": code_commit(),
            "started_at": started,
            "seconds": round(time.time() - started, 2),
            "machine": {"cpus": len(os.sched_getaffinity(0)), "python": platform.python_version()},
            **data,
        }
        self._records[item.name] = record
        self._write()
        return record

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temp = self.path.with_suffix(".tmp")
        text = json.dumps({"records": self._records}, indent=1, sort_keys=True)
        temp.write_text(text + "\n", encoding="utf-8")
        temp.replace(self.path)


def measure(
    records: Records,
    items: Sequence[Item],
    *,
    only: Sequence[str] = (),
    limit: int | None = None,
    redo: bool = False,
    say: Callable[[str], None],
) -> tuple[dict[str, dict[str, Any]], int]:
    """Measure the items that have no record yet, ``redo``: all; ``only``: those whose names begin
    so; ``limit``: at most so many now. (records of the chosen items, number of chosen items)."""
    chosen = [item for item in items if not only or item.name.startswith(tuple(only))]
    todo = [item for item in chosen if redo or item.name not in records][:limit]
    for number, item in enumerate(todo, start=1):
        say(f"[{number}/{len(todo)}] {item.name} ...")
        record = records.run(item)
        say(f"    {'ok' if record['ok'] else 'FAILED'} in {record['seconds']:.0f} s")
        if not record["ok"]:
            say(json.dumps(record, indent=1))
    made = {item.name: records.get(item.name) for item in chosen if item.name in records}
    return made, len(chosen)


def code_commit() -> str:
    """Hash of HEAD, with "+changes" when tracked files differ from it; "unknown" outside git."""
    root = Path(__file__).resolve().parents[2]
    head = _git(root, "rev-parse", "HEAD")
    if not head:
        return "unknown"
    return head + ("+changes" if _git(root, "status", "--porcelain", "-uno") else "")


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
