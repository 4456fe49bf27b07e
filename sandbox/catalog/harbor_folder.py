"""An instance of a shipped family as a Harbor 1.4 folder.

PARL reads tools/tools.py, tests/verify.py and the two data files back. Plain Harbor builds
environment/Dockerfile, where the same tools are a command: ``tool NAME '{"key": ...}'``; the answer
goes into /app/answer.txt, and tests/test.sh judges it together with the end state.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from sandbox.catalog.base import Oracle
from sandbox.manifest.harbor import Manifest
from sandbox.manifest.rendering import render_manifest
from sandbox.packages import package_version
from sandbox.task import TaskSpec, ToolBundle

TEMPLATE = Path(__file__).parent / "harbor"
TOOLKIT = Path(__file__).parents[1] / "toolkit.py"


def write_harbor_folder(
    folder: Path, spec: TaskSpec, bundle: ToolBundle, manifest: Manifest, oracle: Oracle
) -> None:
    """``folder`` must not exist."""
    folder.mkdir(parents=True, exist_ok=False)
    ignore = shutil.ignore_patterns("__pycache__", "__init__.py")
    for part in ("environment", "tests", "solution"):
        shutil.copytree(TEMPLATE / part, folder / part, ignore=ignore)
    (folder / "tools").mkdir()
    for part in ("tools", "environment", "tests"):
        _write(folder / part / "tools.py", bundle.tools_source)
    for part in ("environment", "tests"):
        shutil.copyfile(TOOLKIT, folder / part / "toolkit.py")
        shutil.copyfile(TEMPLATE / "environment" / "tool.py", folder / part / "tool.py")
    _write(folder / "tests" / "verify.py", bundle.verify_source)
    _write(folder / "task.toml", render_manifest(manifest))
    _write(folder / "instruction.md", spec.instruction + "\n")
    for part, data in (("environment", spec.environment.data), ("tests", spec.verifier.data)):
        _write(folder / part / "data.json", json.dumps(data, sort_keys=True, ensure_ascii=False))
    install = ""
    if bundle.packages:
        pins = " ".join(f"{name}=={package_version(name)}" for name in bundle.packages)
        install = f"RUN pip install --no-cache-dir {pins}\n"
    dockerfile = folder / "environment" / "Dockerfile"
    _write(dockerfile, dockerfile.read_text(encoding="utf-8").replace("# $packages\n", install))
    _write(folder / "solution" / "calls.jsonl", _calls_text(oracle))


def _calls_text(oracle: Oracle) -> str:
    lines = [
        json.dumps(
            {
                "name": call.name_text.split(".")[1].split(":")[0],
                "arguments": json.loads(call.arguments_text),
            },
            ensure_ascii=False,
        )
        for calls in oracle.rounds
        for call in calls
    ]
    lines.append(json.dumps({"final_text": oracle.final_text}, ensure_ascii=False))
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
