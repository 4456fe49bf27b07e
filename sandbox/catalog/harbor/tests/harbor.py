"""Runs verify.py where Harbor put things; called by test.sh with three folders.

The end state is collected by a process of its own with this folder's tools.py, not the agent's.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path


def main(app: Path, tests: Path, logs: Path) -> None:
    """Write ``reward.json`` from answer.txt and the end state of ``app``."""
    command = [sys.executable, "-I", str(tests / "tool.py"), "--end-state", str(app)]
    collected = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    spec = importlib.util.spec_from_file_location("verify", tests / "verify.py")
    assert spec is not None and spec.loader is not None, f"{tests}/verify.py is missing"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answer = app / "answer.txt"
    verdict = module.verify(
        final_text=answer.read_text(encoding="utf-8") if answer.exists() else "",
        end_state=json.loads(collected.stdout),
        data=json.loads((tests / "data.json").read_text(encoding="utf-8")),
    )
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "reward.json").write_text(json.dumps({"reward": verdict["correctness"]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
