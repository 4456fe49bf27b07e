"""Evidence (c): the same config as a Ray job on a head node of this machine; and one that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.cluster.head import HeadNode, start_head
from parl.bench.command import ROOT, Finished, run_parl
from parl.bench.records import Item
from parl.cli.runs import find_run
from parl.report.history import read_history
from parl.store.store import Store

CONFIG = ROOT / "configs" / "test.toml"
TIMEOUT_S = 600.0
NUM_ROUNDS = 4


def items(folder: Path) -> list[Item]:
    return [
        Item("job-ok", lambda: _succeeds(folder)),
        Item("job-fails", lambda: _fails(folder)),
    ]


def _succeeds(folder: Path) -> dict[str, Any]:
    """All rounds committed by a job; the client ends with 0 after the job did."""
    runs = folder / "job-ok"
    done = _submit(folder, "job-ok", ["--set", f"run.dir={runs}"])
    if done.code != 0:
        return {"ok": False, "exit_code": done.code, "output": done.last_lines}
    run = find_run(None, runs)
    history = read_history(run.open_ledger(), run.run_id)
    audit = Store(run.open_ledger(), run.run_id).audit()
    return {
        "ok": len(history.rounds) == NUM_ROUNDS and history.status == "finished" and audit.ok,
        "exit_code": done.code,
        "rounds": len(history.rounds),
        "status": history.status,
        "wall_s": round(done.seconds, 1),
    }


def _fails(folder: Path) -> dict[str, Any]:
    """A config that only the job can find wrong: the cause comes back as the last line."""
    ledger = "sqlite:////proc/no-such-folder/ledger.db"
    extra = ["--set", f"run.dir={folder / 'job-fails'}", "--set", f"run.ledger={ledger}"]
    done = _submit(folder, "job-fails", extra)
    cause = done.output.strip().splitlines()[-1]
    return {
        "ok": done.code != 0 and "no-such-folder" in cause,
        "exit_code": done.code,
        "cause": cause,
        "wall_s": round(done.seconds, 1),
    }


def _submit(folder: Path, name: str, extra: list[str]) -> Finished:
    log = folder / f"{name}.log"
    log.unlink(missing_ok=True)
    with start_head(env={"PYTHONPATH": str(ROOT)}) as head:
        return run_parl([*_words(head), *extra], log, TIMEOUT_S)


def _words(head: HeadNode) -> list[str]:
    words = ["rl", "submit", "--config", str(CONFIG), "--set", "backend=ray"]
    words += ["--set", f"rounds.num_rounds={NUM_ROUNDS}"]
    return [*words, "--address", head.jobs_address, "--auth-token", str(head.token_path)]
