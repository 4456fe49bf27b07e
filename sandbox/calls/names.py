"""Tool names as the model writes them (Kimi K2: ``functions.NAME:IDX``)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from sandbox.calls.types import CallError, CallErrorCode, quote

MAX_NAME_CHARS = 256
_SHOWN_TOOLS = 12
_INDEX = re.compile(r":[0-9]{1,9}\Z")
_PREFIX = "functions."


def parse_name(name_text: str, tools: Collection[str]) -> str | CallError:
    """The registered tool that ``name_text`` names, or an error that lists the known tools.

    Accepted: the name itself, and the name with ``functions.`` before and/or ``:n`` after it; an
    affix is taken off only if what remains is registered. Edit distance never picks a tool (it
    runs a different real tool; facts/sandboxes.md 3.2), it only words the hint.
    """
    if not 0 < len(name_text) <= MAX_NAME_CHARS or not name_text.isprintable():
        return CallError(
            CallErrorCode.UNPARSABLE,
            f"unparsable: no tool name could be read from {quote(name_text)}; "
            f"write functions.NAME:INDEX; tools: {_listed(tools)}",
        )
    if name_text in tools:
        return name_text
    without_index = _INDEX.sub("", name_text)
    for candidate in (
        without_index.removeprefix(_PREFIX),
        without_index,
        name_text.removeprefix(_PREFIX),
    ):
        if candidate in tools:
            return candidate
    bare = without_index.removeprefix(_PREFIX)
    near = difflib.get_close_matches(bare, sorted(tools), n=1, cutoff=0.6)
    hint = f"; did you mean {quote(near[0])}?" if near else ""
    return CallError(
        CallErrorCode.UNKNOWN_TOOL,
        f"unknown_tool: {quote(bare)} is not a tool; tools: {_listed(tools)}{hint}",
    )


def _listed(tools: Collection[str]) -> str:
    names = sorted(tools)
    more = f" and {len(names) - _SHOWN_TOOLS} more" if len(names) > _SHOWN_TOOLS else ""
    return (", ".join(names[:_SHOWN_TOOLS]) or "(none)") + more
