"""task.toml -> Manifest, with errors that name file, dotted key and the nearest known key."""

from __future__ import annotations

import difflib
import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from sandbox.errors import TaskError
from sandbox.manifest.harbor import Manifest

_POSITION = re.compile(r"\(at line (\d+), column (\d+)\)$")


def load_manifest(path: Path) -> Manifest:
    """Read and validate one ``task.toml``; TaskError names the file."""
    return parse_manifest(read_text(path), str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; TaskError names file, line and column."""
    return _parse_toml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """A file of a task; TaskError names it and says why it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise TaskError(f"{path}: no such file; a task needs it") from error
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: is not UTF-8 text: {error}") from error


def parse_manifest(text: str, file: str) -> Manifest:
    """Validate the text of a ``task.toml``; ``file`` is only used in error messages."""
    data = _parse_toml(text, file)
    if "version" in data and "schema_version" not in data:
        data["schema_version"] = data.pop("version")
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        raise TaskError(f"{file}: {explain(error, Manifest)}") from error


def _parse_toml(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TaskError(_toml_message(str(error), text, file)) from error


def _toml_message(message: str, text: str, file: str) -> str:
    found = _POSITION.search(message)
    if found:
        line, column = int(found[1]), int(found[2])
    else:  # "(at end of document)"
        lines = text.splitlines() or [""]
        line, column = len(lines), len(lines[-1]) + 1
    what = re.sub(r"\s*\(at [^)]*\)$", "", message)
    return f"{file}:{line}:{column}: not valid TOML: {what}"


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem of a pydantic error as one line, unknown keys first."""
    problems = error.errors(include_url=False)
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    key = ".".join(str(part) for part in problem["loc"]) or "(root)"
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    if problem["type"] == "extra_forbidden":
        known = known_keys(model, problem["loc"][:-1])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key {key!r}: {hint}{more}"
    if problem["type"] == "missing":
        return f"missing key {key!r}: add it{more}"
    value = repr(problem["input"])
    value = value if len(value) <= 60 else value[:57] + "..."
    return f"key {key!r} = {value}: {problem['msg']}{more}"


def known_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Keys allowed at ``path`` (list indices and table names included) below ``model``."""
    current: Any = model
    for part in path:
        inner = _table_of(current)
        if inner is None:
            return []
        by_key = {
            field.alias or name: field.annotation for name, field in inner.model_fields.items()
        }
        current = by_key.get(str(part), current)
    inner = _table_of(current)
    if inner is None:
        return []
    return sorted(field.alias or name for name, field in inner.model_fields.items())


def _table_of(annotation: Any) -> type[BaseModel] | None:
    """The model inside ``X``, ``X | None``, ``list[X]`` or ``dict[str, X]``."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    for argument in typing.get_args(annotation):
        inner = _table_of(argument)
        if inner is not None:
            return inner
    return None
