"""verify.py over what a container left: /app/answer.txt and /app/state.json."""

import json
import runpy
from pathlib import Path

APP, TESTS, LOGS = Path("/app"), Path("/tests"), Path("/logs/verifier")


def read(path: Path) -> str:
    """Text of a regular file of at most 1 MB; links of the agent are not followed."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 1_000_000:
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


source = runpy.run_path(str(TESTS / "verify.py"))
try:
    state = json.loads(read(APP / "state.json"))
except ValueError:
    state = {}
data = json.loads((TESTS / "data.json").read_text())
result = source["verify"](final_text=read(APP / "answer.txt"), end_state=state, data=data)
LOGS.mkdir(parents=True, exist_ok=True)
(LOGS / "reward.json").write_text(json.dumps({"reward": result["correctness"]}))
