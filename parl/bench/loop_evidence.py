"""``python -m parl.bench.loop_evidence``: what the closed loop promises, shown by running it.

Items: seed-1..3 and control-1 (the demo), undisturbed and kill-00..09 (kill -9 sweep), job-ok and
job-fails (Ray jobs). Each is one record in evidence/loop.json with the commit; items that have a
record are skipped, so an interrupted call is simply repeated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parl.bench import demo_runs, job_runs, kill_sweep
from parl.bench.evidence import evidence_app
from parl.bench.records import Item


def all_items(folder: Path) -> list[Item]:
    """Cheapest first: a broken build shows before the long runs."""
    work = folder / "loop"
    return [*kill_sweep.items(work), *job_runs.items(work), *demo_runs.items(work)]


def summary(made: dict[str, dict[str, Any]]) -> str:
    """One line a group of records."""
    lines = []
    seeds = [made[name] for name in made if name.startswith("seed-") and "gain" in made[name]]
    if seeds:
        lines.append(
            f"demo: success {_mean(seeds, 'success_before'):.3f} -> "
            f"{_mean(seeds, 'success_after'):.3f}, tokens {_mean(seeds, 'tokens_change'):+.0%}, "
            f"wall {_mean(seeds, 'wall_s'):.0f} s, mean of {len(seeds)} seeds"
        )
    kills = [made[name] for name in made if name.startswith("kill-")]
    if kills:
        same = sum(not record["differences"] for record in kills)
        lines.append(f"kills: {same} of {len(kills)} runs bit-identical to the undisturbed one")
    lines += [f"FAILED: {name}" for name, record in made.items() if not record["ok"]]
    return "\n".join(lines)


def _mean(records: list[dict[str, Any]], key: str) -> float:
    return sum(record[key] for record in records) / len(records)


app = evidence_app("loop.json", all_items, summary)

if __name__ == "__main__":
    app()
