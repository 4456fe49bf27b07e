"""Runs verify.py where Harbor put things; called by test.sh with three folders."""

import importlib.util
import json
import sqlite3
import sys
from pathlib import Path


def main(app: Path, tests: Path, logs: Path) -> None:
    """Write ``reward.json`` from ``answer.txt`` and ``store.db``."""
    spec = importlib.util.spec_from_file_location("verify", tests / "verify.py")
    assert spec is not None and spec.loader is not None, f"{tests}/verify.py is missing"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answer = app / "answer.txt"
    database = sqlite3.connect(app / "store.db")
    verdict = module.verify(
        final_text=answer.read_text() if answer.exists() else "",
        end_state={"store": dict(database.execute("SELECT key, value FROM store"))},
        data=json.loads((tests / "data.json").read_text()),
    )
    database.close()
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "reward.json").write_text(json.dumps({"reward": verdict["correctness"]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
