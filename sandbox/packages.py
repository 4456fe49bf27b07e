"""Pure-Python distributions as text, so that a box can import them without a file or a mount.

A ToolBundle names them (``packages = ("pypdf",)``). The host reads their sources from its own
environment, ``BoxProgram.hello`` sends them, and ``sandbox.toolkit.install_packages`` registers
them in the agent before the task's code runs. The same way at every level, and no host path shows.
"""

from __future__ import annotations

import functools
from importlib import metadata
from pathlib import Path, PurePosixPath

from sandbox.errors import TaskError

_OURS = frozenset({"parl", "sandbox", "engine", "reward_models", "infra"})
_MAX_CHARS = 6 << 20
"""Of one bundle; a frame to the agent holds 8 MiB."""

PackageSources = dict[str, tuple[bool, str]]
"""Module name -> (is a package, source text)."""


def package_sources(names: tuple[str, ...]) -> PackageSources:
    """Sources of the distributions; TaskError for one that is missing, not pure Python, PARL's own
    (its answers would enter the box) or too large. Dependencies are named by the caller."""
    sources: PackageSources = {}
    for name in names:
        sources.update(_sources_of(name))
    size = sum(len(text) for _, text in sources.values())
    if size > _MAX_CHARS:
        raise TaskError(
            f"packages {', '.join(names)}: {size} characters of source; at most {_MAX_CHARS}"
        )
    return sources


def package_version(name: str) -> str:
    """Installed version; TaskError when it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError as error:
        raise TaskError(f"package {name!r} is not installed here: pip install {name}") from error


@functools.lru_cache(maxsize=16)
def _sources_of(name: str) -> PackageSources:
    package_version(name)
    sources: PackageSources = {}
    for file in metadata.files(name) or []:
        path = PurePosixPath(file)
        if path.suffix in (".so", ".pyd", ".dylib"):
            raise TaskError(f"package {name!r} holds compiled code ({path.name}); a box takes text")
        if path.suffix != ".py" or ".." in path.parts:
            continue
        if path.parts[0] in _OURS:
            raise TaskError(f"package {name!r} is part of PARL; it stays out of the box")
        is_package = path.name == "__init__.py"
        module = ".".join(path.parent.parts if is_package else path.with_suffix("").parts)
        sources[module] = (is_package, Path(str(file.locate())).read_text(encoding="utf-8"))
    if not sources:
        raise TaskError(f"package {name!r} lists no Python file (an editable install?)")
    return sources
