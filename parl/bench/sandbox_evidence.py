"""``python -m parl.bench.sandbox_evidence``: what the sandbox promises, shown by running it.

Items: warm, cold and waits (bars on time and CPU), kill-00..19 (kill -9 of driver, worker, proxy
and pairs), attacks-a, -k, ... (the rows of docs/security.md by file). Each is one record in
evidence/sandbox.json with the commit; items that have a record are skipped, so an interrupted call
is simply repeated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parl.bench import attack_suite
from parl.bench.evidence import evidence_app
from parl.bench.records import Item
from sandbox.backends.base import Level
from sandbox.bench import bars, kill_leaks

NUM_KILLS = 20
SEED = 20261130
LEVELS = ("A", "docker")


def all_items(folder: Path) -> list[Item]:
    """The bars first: they want a machine that is not warm yet."""
    return [
        *(Item(name, _Bars(name)) for name in bars.PARTS),
        *kill_items(),
        *attack_suite.items(folder / "sandbox"),
    ]


def kill_items() -> list[Item]:
    """Boxes at both levels in turn; where one does not work its kills say so and fail."""
    kills = kill_leaks.draw_kills(NUM_KILLS, [Level(name) for name in LEVELS], SEED)
    return [Item(f"kill-{number:02d}", _Kill(kill)) for number, kill in enumerate(kills)]


class _Bars:
    """One part of the bars; called = measured."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self) -> dict[str, Any]:
        part = bars.PARTS[self._name]()
        found = [{**asdict(bar), "ok": bar.ok} for bar in part.bars]
        return {
            "ok": part.ok,
            "bars": found,
            "lost": part.lost,
            "notes": part.notes,
            "load": asdict(part.load),
        }


class _Kill:
    """One round of kills; called = measured."""

    def __init__(self, kill: kill_leaks.Kill) -> None:
        self._kill = kill

    def __call__(self) -> dict[str, Any]:
        if not kill_leaks.usable([self._kill.level.value]):
            return {"ok": False, "problem": f"level {self._kill.level} does not work here"}
        with kill_leaks.round_folder() as folder:
            killed = kill_leaks.kill_once(self._kill, folder)
        return {
            "ok": killed.ok,
            "kill": asdict(self._kill),
            "left": killed.left.counts,
            "left_at_the_end": killed.left_of_all.counts,
            "left_processes": [*killed.left.processes, *killed.left_of_all.processes],
            "boxes": killed.num_boxes,
            "processes": killed.num_processes,
            "gone_s": round(killed.gone_s, 1),
            "right": killed.num_right,
            "null": killed.num_null,
            "null_after": killed.num_null_after,
            "wrong": killed.wrong,
        }


def summary(made: dict[str, dict[str, Any]]) -> str:
    """One line a group of records."""
    lines = []
    for name in bars.PARTS:
        for bar in made.get(name, {}).get("bars", ()):
            load = made[name]["load"]
            shown = bars.Bar(**{key: bar[key] for key in bar if key != "ok"})
            lines.append(f"{shown.line()}, load {load['before']:.1f} -> {load['after']:.1f}")
    kills = [record for name, record in made.items() if name.startswith("kill-")]
    if kills:
        clean = sum(record["ok"] for record in kills)
        lines.append(
            f"kills: {clean} of {len(kills)} left nothing and judged nothing wrongly; "
            f"{sum(r.get('boxes', 0) for r in kills)} boxes, slowest "
            f"{max(r.get('gone_s', 0.0) for r in kills):.1f} s"
        )
    held: Counter[str] = Counter()
    claimed: Counter[str] = Counter()
    for name, record in made.items():
        if name.startswith("attacks-"):
            for level, text in record.get("held", {}).items():
                some, _, of = text.partition(" of ")
                held[level] += int(some)
                claimed[level] += int(of)
    if claimed:
        rows = ", ".join(f"{level} {held[level]} of {claimed[level]}" for level in claimed)
        lines.append(f"attacks: {rows} rows hold")
    lines += [f"FAILED: {name}" for name, record in made.items() if not record["ok"]]
    return "\n".join(lines)


app = evidence_app("sandbox.json", all_items, summary)

if __name__ == "__main__":
    app()
