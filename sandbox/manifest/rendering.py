"""Manifest -> task.toml text (the standard library reads TOML but does not write it)."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from pydantic import BaseModel

from sandbox.errors import TaskError
from sandbox.manifest.harbor import Manifest

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def render_manifest(manifest: Manifest) -> str:
    """Text that ``parse_manifest`` reads back to an equal Manifest."""
    return render_toml(_plain(manifest))


def render_toml(table: dict[str, Any]) -> str:
    """Strings, bools, ints, finite floats, lists and string-keyed dicts; nothing else."""
    lines: list[str] = []
    _render_table(table, (), lines)
    return "\n".join(lines).strip() + "\n"


def _plain(value: Any) -> Any:
    """Models as dicts by alias, without None and without empty lists or tables of *our* fields."""
    if isinstance(value, BaseModel):
        result: dict[str, Any] = {}
        for name, field in type(value).model_fields.items():
            plain = _plain(getattr(value, name))
            if plain is not None and plain not in ({}, []):
                result[field.alias or name] = plain
        return {**result, **(value.model_extra or {})}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _render_table(table: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    simple = {key: value for key, value in table.items() if not isinstance(value, dict)}
    if path and (simple or not table):
        lines += ["", f"[{'.'.join(_key(part) for part in path)}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in simple.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            _render_table(value, (*path, key), lines)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items())
        return "{ " + pairs + " }" if pairs else "{}"
    raise TaskError(f"{value!r} cannot be written as TOML; use text, numbers, lists and tables")
