"""Plays calls.jsonl: every call through the command ``tool``, then answer.txt."""

import json
import subprocess
import sys
from pathlib import Path

app, tool = Path(sys.argv[1]), sys.argv[2]
for line in (Path(__file__).parent / "calls.jsonl").read_text(encoding="utf-8").splitlines():
    entry = json.loads(line)
    if "final_text" in entry:
        (app / "answer.txt").write_text(entry["final_text"], encoding="utf-8")
        continue
    arguments = json.dumps(entry["arguments"], ensure_ascii=False)
    command = [sys.executable, "-I", tool, entry["name"], arguments, str(app)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
