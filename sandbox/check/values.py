"""Other values of the same kind: what an agent could as well have passed or answered.

Where a value stands in the task's data says what else is of its kind: "o-103" as
``orders[2].id`` has the other orders' ids beside it, a key of an object the object's other keys.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.task import TaskSpec
from sandbox.tool_spec import ToolSpec

MAX_CHARS = 80
MAX_CALLS = 60
"""Argument sets a tool is tried with."""
TOLERANT = re.compile(
    r"(?i)\b(within|tolerance|approximate(ly)?|roughly|at most .{0,20}\b(off|away)|deviat\w+"
    r"|plus or minus|margin|error of|accurate to|precision of|up to .{0,20}\boff)\b|\u00b1|\+/-"
    r"|误差|大约|左右|近似"
)
"""Words of an instruction that allow for an answer which is not exact."""
_WORD = re.compile(r"[\w][\w.:/-]{0,38}\w")
_FILES = "files"
"""Key of the data that holds whole files: texts, and no values."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """``place``: the path with list positions left out, so that equal places are of one kind."""

    place: tuple[str, ...]
    value: Any


def leaves(data: Any, place: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Every scalar and every key of nested data; a key's place ends with "*"."""
    if isinstance(data, dict):
        for key, inner in data.items():
            if place == () and key == _FILES:
                continue
            yield Leaf((*place, "*"), key)
            yield from leaves(inner, (*place, str(key)))
    elif isinstance(data, list):
        for inner in data:
            yield from leaves(inner, (*place, "[]"))
    elif data is not None:
        yield Leaf(place, data)


def siblings(
    value: Any, data: Any, texts: Sequence[str] = (), schema: dict[str, Any] | None = None
) -> list[Any]:
    """Other values of the kind of ``value``: those its schema lists, those beside it in ``data``,
    else words of ``texts`` (what tools answered) that are built alike. [] when there are none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return []
    if isinstance(value, str) and (len(value) > MAX_CHARS or "\n" in value):
        return []
    listed = (schema or {}).get("enum")
    if listed:
        return [other for other in listed if other != value]
    every = list(leaves(data))
    places = {leaf.place for leaf in every if _equal(leaf.value, value)}
    found = [leaf.value for leaf in every if leaf.place in places]
    if not found and isinstance(value, str) and re.search(r"\d", value):
        shape = _shape(value)
        found = [word for text in texts for word in _WORD.findall(text) if _shape(word) == shape]
    others = [other for other in found if not _equal(other, value) and type(other) is type(value)]
    return list(dict.fromkeys(others))


def _equal(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left == right


def _shape(word: str) -> str:
    return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "0", word))


def other_answer(answer: str) -> str:
    """A wrong answer that looks like the right one: other digits, else other words."""
    if re.search(r"[0-9]", answer):
        return re.sub(r"[0-9]", lambda digit: str((int(digit[0]) + 1) % 10), answer)
    return f"not-{answer}" if answer else "parl-other"


def argument_sets(
    spec: TaskSpec, tool: ToolSpec, played: Sequence[dict[str, Any]], texts: Sequence[str]
) -> list[dict[str, Any]]:
    """What a tool may be called with: first ``played`` (arguments that the solution passes to it),
    then each value of the world in each place, the others as they are likely; at most MAX_CALLS."""
    properties: dict[str, Any] = tool.schema.get("properties", {})
    required = [key for key in properties if key in tool.schema.get("required", ())]
    found: list[dict[str, Any]] = [dict(arguments) for arguments in played]
    pools = {key: _pool(schema, spec, texts) for key, schema in properties.items()}
    usual = dict(found[0]) if found else {
        key: pools[key][0] for key in required if pools[key]}  # fmt: skip
    found.append(usual)
    for key in properties:
        found += [{**usual, key: value} for value in pools[key]]
    draw = random.Random(f"parl-check|{spec.name}|{tool.name}")
    if len(required) > 1 and all(pools[key] for key in required):
        found += [{key: draw.choice(pools[key]) for key in required} for _ in range(20)]
    distinct: list[dict[str, Any]] = []
    for arguments in found:
        if arguments not in distinct and all(key in arguments for key in required):
            distinct.append(arguments)
    return distinct[:MAX_CALLS]


def _pool(schema: dict[str, Any], spec: TaskSpec, texts: Sequence[str]) -> list[Any]:
    """Values for one argument, the likely ones first."""
    if "enum" in schema:
        return list(schema["enum"])
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return [value for part in schema[key] for value in _pool(part, spec, texts)]
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    world = [leaf.value for leaf in leaves(spec.environment.data)]
    match kind:
        case "integer":
            low, high = schema.get("minimum", 0), schema.get("maximum", 10**6)
            numbers = [1, 2, 0, low, high]
            numbers += [value for value in world if type(value) is int][:20]
            return [value for value in dict.fromkeys(numbers) if low <= value <= high]
        case "number":
            numbers = [value for value in world if type(value) in (int, float)][:20]
            return list(dict.fromkeys([1.0, schema.get("minimum", 0.0), *numbers]))
        case "boolean":
            return [False, True]
        case "array":
            items = _pool(schema.get("items", {}), spec, texts)
            return [[], *([value] for value in items[:10])]
        case "object":
            return [{}]
        case "null":
            return [None]
    words = [value for value in world if isinstance(value, str) and len(value) <= MAX_CHARS]
    words += [word for text in texts for word in _WORD.findall(text)[:20]]
    return list(dict.fromkeys(words))[:40] or ["x"]
