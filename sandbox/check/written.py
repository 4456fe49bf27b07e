"""What the oracle writes: the files of its world before and after, seen from inside the box."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

from sandbox.check.episodes import Stage
from sandbox.check.probe import probe_script
from sandbox.check.scripts import Script
from sandbox.task import TaskSpec

_LIST = """
# {label}
import base64, json, os
found, total = {{}}, 0
for folder, folders, names in os.walk(os.getcwd()):
    folders[:] = sorted(name for name in folders if name != "site-packages")
    for name in sorted(names):
        path = os.path.join(folder, name)
        if os.path.islink(path) or not os.path.isfile(path) or len(found) > 400:
            continue
        try:
            with open(path, "rb") as file:
                content = base64.b64encode(file.read(100000)).decode()
        except OSError:
            continue
        if total + len(content) < 600000:
            found[os.path.relpath(path)] = content
            total += len(content)
print(json.dumps(found))
"""
_NO_ARTIFACTS = ("solution/", "tests/")
MAX_JSON = 4


@dataclass(frozen=True, slots=True)
class Written:
    """Paths are relative to the working folder. ``artifacts``: new or changed by the oracle;
    ``inputs``: there before and left alone; ``removed``: gone after it; ``texts``: what its calls
    answered."""

    artifacts: dict[str, bytes] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def json_artifacts(self) -> dict[str, Any]:
        """Those that hold a JSON object or list, at most MAX_JSON."""
        found: dict[str, Any] = {}
        for path, content in self.artifacts.items():
            try:
                value = json.loads(content)
            except ValueError:
                continue
            if isinstance(value, dict | list) and len(found) < MAX_JSON:
                found[path] = value
        return found


async def written_by(stage: Stage, spec: TaskSpec, oracle: Script) -> Written:
    """``spec`` and ``stage`` are those of the probe bundle. Empty when the box shows no files."""
    rounds = (*_listing("before").rounds, *oracle.rounds, *_listing("after").rounds)
    played = await stage.play(spec, Script("oracle-listed", rounds, oracle.final_text))
    seen = played.observations
    try:
        before, after = json.loads(seen[0].text), json.loads(seen[-1].text)
    except (ValueError, IndexError):
        return Written()
    if len(seen) < 2 or not isinstance(before, dict) or not isinstance(after, dict):
        return Written()
    changed = {
        path: base64.b64decode(content)
        for path, content in after.items()
        if before.get(path) != content and not path.startswith(_NO_ARTIFACTS)
    }
    return Written(
        artifacts=changed,
        inputs=tuple(path for path in before if after.get(path) == before[path]),
        removed=tuple(path for path in before if path not in after),
        texts=tuple(observation.text for observation in seen[1:-1]),
    )


def _listing(label: str) -> Script:
    return probe_script(label, _LIST.format(label=label))
