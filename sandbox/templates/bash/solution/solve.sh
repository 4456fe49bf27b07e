#!/bin/bash
set -eu
cat > /app/count.py <<'PY'
import collections, json, pathlib
counts = collections.Counter()
for path in sorted(pathlib.Path("/app/logs-in").glob("*.log")):
    for line in path.read_text().splitlines():
        _, level, message = line.split(maxsplit=2)
        if level == "ERROR":
            counts[message] += 1
pathlib.Path("/app/report.json").write_text(json.dumps(counts))
PY
python3 -I /app/count.py
