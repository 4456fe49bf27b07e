"""What the oracle writes: the files of its world before and after, seen from inside the box."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

from sandbox.check.episodes import Stage
from sandbox.check.probe import STATE_KEY, probe_script
from sandbox.check.scripts import Script
from sandbox.task import TaskSpec

_LIST = """
# {label}
import base64, hashlib, json, os
found, total, left = {{}}, 0, []
for folder, folders, names in os.walk(os.getcwd()):
    folders[:] = sorted(name for name in folders if name != "site-packages")
    for name in sorted(names):
        path = os.path.join(folder, name)
        if os.path.islink(path) or not os.path.isfile(path):
            continue
        shown = os.path.relpath(path)
        digest = hashlib.sha256()
        try:
            with open(path, "rb") as file:
                content = file.read(100001)
                digest.update(content)
                while more := file.read(1 << 20):
                    digest.update(more)
        except OSError:  # what the agent's user cannot read it cannot have written
            continue
        coded = None
        if len(content) > 100000 or total > 400000 or len(found) >= 400:
            left.append(shown)
        else:
            coded = base64.b64encode(content).decode()
            total += len(content)
        if len(found) < 2000:
            found[shown] = [digest.hexdigest()[:16], coded]
print(json.dumps({{"files": found, "left": len(left), "examples": left[:3]}}))
"""
_OVERWRITE = """
import pathlib
failed = []
for name in {remove!r}:
    path = pathlib.Path(name)
    try:
        path.unlink() if {delete!r} else path.write_text("")
    except OSError as error:
        failed.append(str(error))
for name in {names!r}:
    try:
        pathlib.Path(name).write_text({text!r})
    except OSError as error:
        failed.append(str(error))
print("failed: " + "; ".join(failed) if failed else {done!r})
"""
OVERWRITTEN = "parl: overwritten"
"""What the overwriting probe answers when every file was written."""
_NO_ARTIFACTS = ("solution/", "tests/")
MAX_JSON = 4
MAX_TEXTS = 2
_OTHERS = (".csv", ".tsv", ".jsonl", ".py", ".sh", ".js", ".pyc", ".db", ".sqlite", ".log")


@dataclass(frozen=True, slots=True)
class Written:
    """Paths are relative to the working folder. ``artifacts``: new or changed by the oracle;
    ``created``: the new ones; ``inputs``: there before and left alone; ``removed``: gone after it;
    ``texts``: what its calls answered, ``errors``: the classes of those that failed; ``state`` and
    ``correctness``: its end state as text, and its score. ``problem``: why this could not be seen,
    or None; ``left``: files too large or too many to be read."""

    artifacts: dict[str, bytes] = field(default_factory=dict)
    created: frozenset[str] = frozenset()
    inputs: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    errors: tuple[str | None, ...] = ()
    state: str = ""
    correctness: float = 1.0
    problem: str | None = None
    left: tuple[str, ...] = ()

    @property
    def json_artifacts(self) -> dict[str, Any]:
        """Those that hold a JSON object or list, at most MAX_JSON; each costs some ten episodes."""
        found: dict[str, Any] = {}
        for path, content in self.artifacts.items():
            try:
                value = json.loads(content)
            except ValueError:  # no JSON: tried as a table or as an input, if it is one
                continue
            if isinstance(value, dict | list) and len(found) < MAX_JSON:
                found[path] = value
        return found

    @property
    def texts_made(self) -> list[str]:
        """New text files that are neither JSON nor tables nor programs, at most MAX_TEXTS."""
        found = []
        for path, content in self.artifacts.items():
            if path not in self.created or path.startswith((".", "solution/", "tests/", "logs/")):
                continue
            if path.endswith(_OTHERS) or content[:2] == b"#!" or not 0 < len(content) < 20_000:
                continue
            try:
                value = json.loads(content)
            except ValueError:  # what is looked for, if it is text at all
                value = 0
            if isinstance(value, dict | list) or b"\0" in content:
                continue
            found.append(path)
        return found[:MAX_TEXTS]


async def written_by(stage: Stage, spec: TaskSpec, oracle: Script) -> Written:
    """``spec`` and ``stage`` are those of the probe bundle. ``problem`` is set when the box does
    not show its files."""
    rounds = (*_listing("before").rounds, *oracle.rounds, *_listing("after").rounds)
    played = await stage.play(spec, Script("oracle-listed", rounds, oracle.final_text))
    seen = played.observations
    if len(seen) < 2 or played.stop is not None:
        words = seen[-1].text if seen else played.start_text
        return Written(problem=f"the episode ended early: {words[:200]}")
    try:
        before, after = json.loads(seen[0].text), json.loads(seen[-1].text)
        files_before, files_after = before["files"], after["files"]
    except (ValueError, KeyError, TypeError) as error:
        return Written(problem=f"no list of files ({error}): {seen[-1].text[:200]}")
    changed = {
        path: base64.b64decode(content)
        for path, (digest, content) in files_after.items()
        if content is not None
        and files_before.get(path, [None])[0] != digest
        and not path.startswith(_NO_ARTIFACTS)
    }
    return Written(
        artifacts=changed,
        created=frozenset(path for path in changed if path not in files_before),
        inputs=tuple(
            path
            for path, (digest, _) in files_before.items()
            if files_after.get(path, [None])[0] == digest
        ),
        removed=tuple(path for path in files_before if path not in files_after),
        texts=tuple(observation.text for observation in seen[1:-1]),
        errors=tuple(observation.error for observation in seen[1:-1]),
        state=str(played.verdict.details.get(STATE_KEY)),
        correctness=played.verdict.correctness or 0.0,
        left=tuple(after["examples"]) if after["left"] else (),
    )


def _listing(label: str) -> Script:
    return probe_script(label, _LIST.format(label=label))


def overwriting(
    name: str,
    oracle: Script,
    names: list[str],
    text: str,
    remove: list[str] | None = None,
    delete: bool = True,
) -> Script:
    """The oracle, then ``text`` in place of some files; ``remove``: others to delete or empty."""
    code = _OVERWRITE.format(
        names=names, text=text, remove=remove or [], delete=delete, done=OVERWRITTEN
    )
    probe = probe_script(name, code)
    return Script(name, (*oracle.rounds, *probe.rounds), oracle.final_text)
