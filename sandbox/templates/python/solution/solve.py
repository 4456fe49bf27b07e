"""Raise the prices in /app/state.json and write /app/answer.txt."""

import json
from pathlib import Path

app = Path("/app")
state = json.loads((app / "state.json").read_text())
scarce = [item for item in state["items"].values() if item["stock"] < 10]
for item in scarce:
    item["price"] = item["price"] * 6 // 5
(app / "state.json").write_text(json.dumps(state))
(app / "answer.txt").write_text(str(len(scarce)))
