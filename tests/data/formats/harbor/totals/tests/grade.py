import json
import subprocess
from pathlib import Path

from expected import total

region = subprocess.run(["region"], capture_output=True, text=True, check=True).stdout.strip()
answer = json.loads(Path("/app/out/totals.json").read_text())
checks = {
    "region": answer.get("region") == region == "north",
    "currency": answer.get("currency") == "EUR",
    "total": answer.get("total") == total(region) == 1334.25,
}
print(checks)
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": int(all(checks.values()))}))
