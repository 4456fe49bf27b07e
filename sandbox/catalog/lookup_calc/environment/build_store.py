"""data.json -> store.db, at image build."""

import json
import sqlite3
import sys
from pathlib import Path

store = json.loads(Path(sys.argv[1]).read_text())["store"]
database = sqlite3.connect(sys.argv[2])
database.execute("CREATE TABLE store (key TEXT PRIMARY KEY, value INTEGER NOT NULL)")
database.executemany("INSERT INTO store VALUES (?, ?)", sorted(store.items()))
database.commit()
database.close()
