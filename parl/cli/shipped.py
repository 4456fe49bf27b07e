"""Shipped tasks by the name a person types."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandbox.catalog.base import Family


def find_task(name: str) -> tuple[Family, str]:
    """Family and type of ``family/type`` (or ``type`` alone when only one family has it)."""
    from sandbox.catalog.registry import get_family, list_tasks
    from sandbox.errors import TaskError

    known = list_tasks()
    matches = [task for task in known if task == name or task.partition("/")[2] == name]
    if len(matches) != 1:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TaskError(f"unknown task {name!r}; known: {', '.join(known)}{hint}")
    family_name, _, task_type = matches[0].partition("/")
    return get_family(family_name), task_type
