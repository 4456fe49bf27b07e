"""Write a complete example task: ``write_task(Path("my-task"), "org/my-task", "python")``."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from string import Template

from sandbox.errors import TaskError
from sandbox.manifest.native import slug

HERE = Path(__file__).parent
FAMILIES = ("python", "http", "mcp", "bash")
"""python: functions; http: a service in the box; mcp: an MCP server in the box; bash: a shell."""
SHARED = HERE / "shared"
"""What plain Harbor starts in the examples with tools.py; each written folder gets its own copy."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


MAX_NAME = 100
"""Characters of a task's name: it becomes the name of folders, images and boxes."""


def write_task(folder: Path, name: str, family: str) -> Path:
    """Copy the example of a family and put the name in; ``name`` is org/name or name.

    TaskError for an unknown family, a name Harbor would refuse, or a folder that exists.
    """
    if family not in FAMILIES:
        raise TaskError(f"--family {family!r}: expected one of {', '.join(FAMILIES)}")
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise TaskError(
            f"task name {name!r}: expected org/name (or name) of letters, digits, dots, dashes and "
            f"underscores, at most {MAX_NAME}"
        )
    if folder.exists():
        raise TaskError(f"{folder}: exists already; choose another name or remove it")
    full = name if "/" in name else f"local/{name}"
    try:
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(HERE / family, folder, ignore=ignore)
        if family != "bash":  # it is a plain Harbor task, with tests of its own
            shutil.copytree(SHARED, folder, ignore=ignore, dirs_exist_ok=True)
        for file in ("task.toml", "README.md"):
            path = folder / file
            text = Template(path.read_text(encoding="utf-8"))
            path.write_text(text.substitute(name=full, slug=slug(full.split("/")[1])), "utf-8")
        for script in folder.rglob("*.sh"):
            script.chmod(0o755)
    except OSError as error:
        raise TaskError(f"{folder}: cannot be written: {error.strerror}") from error
    return folder
