"""One line out of pydantic's report: source, dotted key, value, what was expected."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from infra.config.model import annotation_at, sections_of
from infra.errors import ConfigError

Path = tuple[str | int, ...]


def explain(
    error: ValidationError,
    model_cls: type[BaseModel],
    data: Mapping[str, Any],
    sources: Mapping[tuple[str, ...], str],
) -> ConfigError:
    """The first wrong key in full, the other wrong keys by name."""
    by_key: dict[Path, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_key.setdefault(_data_path(detail, data), []).append(detail)
    (path, details), *others = by_key.items()
    where = _source(path, sources)
    line = f"{where}{_describe(path, details, model_cls)}"
    if others:
        names = ", ".join(_dotted(other) or "the whole file" for other, _ in others[:5])
        line += f" (also wrong: {names}{', ...' if len(others) > 5 else ''})"
    return ConfigError(line)


def _describe(path: Path, details: list[ErrorDetails], model_cls: type[BaseModel]) -> str:
    kinds = {detail["type"] for detail in details}
    key = _dotted(path)
    if kinds == {"extra_forbidden"}:
        return _unknown_key(path, model_cls)
    if kinds == {"missing"}:
        return f"{key} is missing: {_expected_type(path, model_cls)}"
    value = details[0]["input"]
    shown = key if isinstance(value, dict) and len(value) > 3 else f"{key} = {_short(value)}"
    if kinds <= {"value_error", "assertion_error"}:
        # raised by a validator of ours: it says itself what it wants
        message = details[0]["msg"].partition(", ")[2]
        return f"{shown}: {message}" if key else message
    wanted = " or ".join(dict.fromkeys(_expectation(detail) for detail in details))
    return f"{shown}: expected {wanted}" if key else f"expected {wanted}"


def _unknown_key(path: Path, model_cls: type[BaseModel]) -> str:
    annotation = annotation_at([model_cls], path[:-1])
    while annotation is not None and not sections_of(annotation):
        annotation = None
    sections = sections_of(annotation) if path[:-1] else [model_cls]
    known = sorted({name for section in sections for name in section.model_fields})
    near = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
    level = _dotted(path[:-1]) or "the top level"
    hint = f"did you mean {near[0]}? " if near else ""
    return f"unknown key {_dotted(path)}: {hint}{level} knows {', '.join(known)}"


def _expected_type(path: Path, model_cls: type[BaseModel]) -> str:
    annotation = annotation_at([model_cls], path)
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return f"expected a value of type {name}"


def _expectation(detail: ErrorDetails) -> str:
    if detail["type"] in ("model_type", "dict_type"):
        return "a table"
    return detail["msg"].removeprefix("Input should be ").replace("\n", " ")


def _data_path(detail: ErrorDetails, data: Any) -> Path:
    """The part of pydantic's location that is in the file; union arms add steps that are not."""
    steps: list[str | int] = []
    last = len(detail["loc"]) - 1
    for index, step in enumerate(detail["loc"]):
        inside = _children(data)
        if step in inside:
            data = inside[step]
            steps.append(step)
        elif detail["type"] == "missing" and index == last:
            steps.append(step)
    return tuple(steps)


def _children(data: Any) -> Mapping[str | int, Any]:
    if isinstance(data, Mapping):
        return data
    return dict(enumerate(data)) if isinstance(data, list) else {}


def _source(path: Path, sources: Mapping[tuple[str, ...], str]) -> str:
    """``file: `` of the key or of the nearest table around it; empty for defaults."""
    names = tuple(str(step) for step in path)
    below = [source for key, source in sources.items() if key[: len(names)] == names]
    if names and below:
        return f"{below[-1]}: "
    for end in range(len(names), 0, -1):
        if names[:end] in sources:
            return f"{sources[names[:end]]}: "
    files = dict.fromkeys(sources.values())
    return f"{', '.join(files)}: " if files and len(files) <= 3 else ""


def _dotted(path: Sequence[str | int]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".")


def _short(value: Any, limit: int = 80) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
