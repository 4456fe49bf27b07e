"""The registry of tasks on the command line: a ledger of the user's own unless told otherwise."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from parl.store.tasks import TaskRegistry

VARIABLE = "PARL_REGISTRY"
Registry = Annotated[
    str, typer.Option("--registry", help=f"Ledger URL of the task registry; default ${VARIABLE}.")
]


def registry_url(given: str = "") -> str:
    """``given``, else $PARL_REGISTRY, else tasks.db in the user's data folder."""
    url = given or os.environ.get(VARIABLE, "")
    if url:
        return url
    base = os.environ.get("XDG_DATA_HOME")
    return (
        f"sqlite:///{(Path(base) if base else Path.home() / '.local' / 'share') / 'parl'}/tasks.db"
    )


def open_registry(given: str = "", create: bool = True) -> TaskRegistry | None:
    """None when ``create`` is False and there is no registry yet."""
    from infra.db.engine import open_ledger
    from parl.store.tasks import TaskRegistry

    url = registry_url(given)
    file = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///"):
        if not file.exists() and not create:
            return None
        file.parent.mkdir(parents=True, exist_ok=True)
    return TaskRegistry(open_ledger(url, create=create))


def registry_or_error(given: str) -> TaskRegistry:
    """TaskError when nothing was ever published."""
    from sandbox.errors import TaskError

    registry = open_registry(given, create=False)
    if registry is None:
        raise TaskError(f"no task registry at {registry_url(given)}; `parl task publish` makes one")
    return registry
