"""TOML out of a model, such that reading it back gives an equal model; and its hash."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from infra.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
# TOML forbids raw control characters (DEL too) in strings
_CONTROL = re.compile(r"[\x00-\x1f\x7f\"\\]")
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def dump_toml(model: BaseModel) -> str:
    """The complete configuration, defaults included; ``load_config`` of it gives an equal model.

    TOML has no null: a None is left out, and ConfigError is raised where leaving it out would
    bring back another default.
    """
    _check_nulls(model, ())
    lines: list[str] = []
    _write_table(model.model_dump(mode="json"), (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def flat(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Dotted key -> value of nested tables, for comparing two configurations."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, (*path, key))
        else:
            found[".".join((*path, key))] = value
    return found


def config_hash(model: BaseModel) -> str:
    """sha256 hex over the canonical JSON of all values, defaults included."""
    canonical = json.dumps(
        model.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def _write_table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    nested = {key: value for key, value in table.items() if isinstance(value, dict)}
    if path and (plain or not nested):
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items() if value is not None]
    for key, value in nested.items():
        _write_table(value, (*path, key), lines)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        pairs = (f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
        return f"{{{', '.join(pairs)}}}"
    raise ConfigError(f"cannot write {value!r} as TOML: expected text, number, list or table")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    escaped = _CONTROL.sub(lambda m: _SHORT.get(m[0], f"\\u{ord(m[0]):04x}"), text)
    return f'"{escaped}"'


def _check_nulls(model: BaseModel, path: tuple[str, ...]) -> None:
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        here = (*path, name)
        if isinstance(value, BaseModel):
            _check_nulls(value, here)
        elif value is None:
            default = field.get_default(call_default_factory=True)
            if default is not None:
                raise ConfigError(_null_message(here, default))
        elif _holds_null(value):
            raise ConfigError(_null_message(here, value))


def _holds_null(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(v is None or _holds_null(v) for v in value.values())
    if isinstance(value, list | tuple):
        return any(v is None or _holds_null(v) for v in value)
    return False


def _null_message(path: tuple[str, ...], found: Any) -> str:
    return (
        f"{'.'.join(path)}: TOML has no null, and leaving it out would read back as {found!r}; "
        "give it a value"
    )
