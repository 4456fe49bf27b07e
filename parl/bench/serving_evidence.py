"""``python -m parl.bench.serving_evidence``: what serving promises under load, shown by running it.

Items: settings, burst, vip, summaries, debug (engine.bench.load), update (new weights under load),
soak (ten minutes) and starts (times to first token after a warm and a cold start). Each is one
record in evidence/serving.json with the commit; items that have a record are skipped, so an
interrupted call is simply repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engine.bench import load, soak, updates
from parl.bench.evidence import evidence_app
from parl.bench.records import Item

LOAD_S, UPDATE_S, SOAK_MINUTES = 60.0, 60.0, 10.0
SHOWN = {
    "settings": ("clients", "lost", "tokens_per_s", "tokens_per_cpu_s", "total_ms_p99"),
    "burst": ("default", "for all"),
    "vip": ("loaded_first_ms_p99", "bound_ms", "idle_first_ms_p99", "others_first_ms_p99"),
    "summaries": ("step_ms_with", "step_ms_skipped", "saved"),
    "debug": ("step_ms_off", "step_ms_on", "overhead_when_off"),
    "update": ("answers", "checked", "mixed", "swaps", "versions_seen"),
    "soak": ("rss_mib_by_quarter", "rss_change", "first_ms_p50", "first_ms_p99"),
    "starts": ("cold_std_ms", "warm_std_ms", "ratio"),
}


def all_items(folder: Path) -> list[Item]:
    """``folder``: nothing but records is left there."""
    del folder
    parts: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        *((name, partial(load.measure, name, LOAD_S)) for name in load.PARTS),
        ("update", partial(updates.measure, UPDATE_S)),
        ("soak", partial(soak.measure, SOAK_MINUTES)),
        ("starts", soak.compare_starts),
    ]
    return [Item(name, measure) for name, measure in parts]


def summary(made: dict[str, dict[str, Any]]) -> str:
    """One line a record."""
    lines: list[str] = []
    for name, record in made.items():
        figures = ", ".join(f"{key} {record[key]}" for key in SHOWN[name] if key in record)
        lines.append(f"{'ok' if record['ok'] else 'FAILED':<7}{name}: {figures}")
    return "\n".join(lines)


app = evidence_app("serving.json", all_items, summary)

if __name__ == "__main__":
    app()
