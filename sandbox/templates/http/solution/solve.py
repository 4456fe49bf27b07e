"""Refund in /app/state.json and write /app/answer.txt."""

import json
from pathlib import Path

app = Path("/app")
state = json.loads((app / "state.json").read_text())
hit = [o for o in state["orders"] if o["customer"] == "c-17" and o["state"] == "damaged"]
for order in hit:
    order["state"] = "refunded"
(app / "state.json").write_text(json.dumps(state))
(app / "answer.txt").write_text(str(sum(order["cents"] for order in hit)))
