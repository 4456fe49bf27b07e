"""Tool names as the model writes them (Kimi K2: ``functions.NAME:IDX``)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from sandbox.calls.types import CallError, CallErrorCode, quote
from sandbox.calls.words import folded

MAX_NAME_CHARS = 256
_SHOWN_TOOLS = 12
_INDEX = re.compile(r":[0-9]{1,9}\Z")
_PREFIX = "functions."
_LOOSE_PREFIX = re.compile(r"functions[._:/]?", re.IGNORECASE)
_LOOSE_INDEX = re.compile(r"[:_.\-]?[0-9]{1,9}\Z")
_SERVER = re.compile(r"(?:__|[.:/])")
"""What stands between an MCP server's name and its tool's."""


@dataclass(frozen=True, slots=True)
class ToolName:
    """The registered tool and the repair tags it took to see that."""

    tool: str
    repairs: tuple[str, ...] = ()


def parse_name(
    name_text: str,
    tools: Collection[str],
    aliases: Mapping[str, str] | None = None,
    *,
    repair: bool = True,
) -> ToolName | CallError:
    """The registered tool that ``name_text`` names, or an error that lists the known tools.

    Without repair: the name itself, and the name with ``functions.`` before and/or ``:n`` after
    it. With repair also, in this order and only where exactly one tool is meant: white space
    around it, other affixes (``functions_NAME_n``, ``functionsNAMEn``), another case or separator,
    a declared alias (``aliases``: alias -> tool), an MCP tool without its server. An affix is taken
    off only if what remains is registered. Edit distance never picks a tool (it runs a different
    real tool; facts/sandboxes.md 3.2), it only words the hint.
    """
    name = name_text.strip() if repair else name_text
    if not 0 < len(name_text) <= MAX_NAME_CHARS or not name or not name.isprintable():
        return CallError(
            CallErrorCode.UNPARSABLE,
            f"unparsable: no tool name could be read from {quote(name_text)}; "
            f"write functions.NAME:INDEX; tools: {_listed(tools)}",
        )
    tags = ("name:space",) if name != name_text else ()
    forms = list(dict.fromkeys(_canonical_forms(name)))
    for form in forms:
        if form in tools:
            return ToolName(form, tags)
    if repair:
        for tag, candidates in _repairs(forms, tools, aliases or {}):
            if len(candidates) == 1:
                return ToolName(candidates.pop(), (*tags, tag))
            if candidates:
                break
    return _unknown(_INDEX.sub("", name).removeprefix(_PREFIX), tools)


def _canonical_forms(name: str) -> Iterator[str]:
    """The name, and what is left without the affixes of the wire format; most literal first."""
    without_index = _INDEX.sub("", name)
    yield name
    yield without_index.removeprefix(_PREFIX)
    yield without_index
    yield name.removeprefix(_PREFIX)


def _repairs(
    forms: list[str], tools: Collection[str], aliases: Mapping[str, str]
) -> Iterator[tuple[str, set[str]]]:
    """(tag, tools that the name may mean) of each repair, in order."""
    loose = list(dict.fromkeys(form for name in forms for form in _loose_forms(name)))
    all_forms = list(dict.fromkeys((*forms, *loose)))
    yield "name:affix", {form for form in loose if form in tools}
    by_fold = _grouped(tools, folded)
    yield "name:style", _found(map(folded, forms), by_fold) or _found(map(folded, loose), by_fold)
    by_alias = _grouped(aliases, folded)
    named = {aliases[form] for form in all_forms if form in aliases}
    yield (
        "name:alias",
        named or {aliases[alias] for alias in _found(map(folded, all_forms), by_alias)},
    )
    by_suffix = _grouped(tools, lambda tool: _SERVER.split(tool)[-1])
    whole = {suffix: found for suffix, found in by_suffix.items() if found != {suffix}}
    yield "name:mcp_suffix", _found(forms, whole) or _found(loose, whole)


def _loose_forms(name: str) -> Iterator[str]:
    match = _LOOSE_PREFIX.match(name)
    bare = name[match.end() :] if match else name
    yield bare
    yield _LOOSE_INDEX.sub("", bare)
    yield _LOOSE_INDEX.sub("", name)


def _grouped(names: Iterable[str], key: Callable[[str], str]) -> dict[str, set[str]]:
    groups: dict[str, set[str]] = {}
    for name in names:
        groups.setdefault(key(name), set()).add(name)
    return groups


def _found(forms: Iterable[str], groups: Mapping[str, set[str]]) -> set[str]:
    return {name for form in forms for name in groups.get(form, ())}


def _unknown(bare: str, tools: Collection[str]) -> CallError:
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
