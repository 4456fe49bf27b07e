"""Compare /app/report.json with the right counts and write the reward."""

import json
from pathlib import Path

WANTED = {"timeout db-2": 3, "refused db-1": 1}
report = Path("/app/report.json")
found = None
if report.is_file() and not report.is_symlink() and report.stat().st_size < 100_000:
    try:
        found = json.loads(report.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        found = None
rewards = Path("/logs/verifier")
rewards.mkdir(parents=True, exist_ok=True)
(rewards / "reward.json").write_text(json.dumps({"reward": 1.0 if found == WANTED else 0.0}))
