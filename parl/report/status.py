"""``parl rl status``: where a run stands, as text."""

from __future__ import annotations

from parl.report import table, words
from parl.report.history import RunHistory
from parl.report.progress import round_line

LAST_ROUNDS = 3


def status_text(history: RunHistory, status: str = "") -> str:
    """Several lines; the first one is the whole answer for a machine with little patience.
    ``status``: what is known beyond the ledger, which a killed driver cannot write to."""
    done, total = len(history.rounds), history.num_rounds
    lines = [
        f"run {history.run_id}: {status or history.status}, {done}/{total} rounds, "
        f"left {words.duration(history.time_left() if done < total else 0.0)}"
    ]
    if history.error:
        lines.append(f"error     {history.error}")
    lines += [f"open      {text}" for text in history.open_rounds]
    for report in history.rounds[-LAST_ROUNDS:]:
        lines.append(round_line(report, report.seconds.get("total", 0.0), history.time_left()))
    lines.append(f"episodes  {_listed(history.episode_states)}")
    if history.drop_reasons:
        lines.append(f"dropped   {_listed(history.drop_reasons)}")
    lines += [f"failed    {count} x {text}" for text, count in history.errors.items()]
    lines.append(
        f"weights   {history.num_weight_versions} versions, {len(history.checkpoints)} checkpoints"
        f", {history.num_leases} leases held"
    )
    rows = table.before_after(history)
    if rows:
        lines += ["", table.as_text(rows)]
    return "\n".join(lines)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
