"""Sum of the keys named in calls.jsonl's lookups, written to answer.txt."""

import json
import sqlite3
import sys
from pathlib import Path

app = Path(sys.argv[1])
calls = [
    json.loads(line) for line in (Path(__file__).parent / "calls.jsonl").read_text().splitlines()
]
keys = [json.loads(call["arguments"])["key"] for call in calls if call.get("name") == "lookup"]
database = sqlite3.connect(app / "store.db")
store = dict(database.execute("SELECT key, value FROM store"))
database.close()
(app / "answer.txt").write_text(str(sum(store[key] for key in keys)))
