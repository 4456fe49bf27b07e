"""load_config: merge TOML files, apply overrides, validate, and say in one line what is wrong.

Sections (fields that are models) merge key by key. Any other value, a free table such as
``mix = {add = 1.0}`` included, is replaced whole by the later file, just as a file replaces the
default. An override may reach into a free table; it edits the value that is in effect there.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from infra.config.explain import explain
from infra.config.model import annotation_at, sections_of
from infra.errors import ConfigError

M = TypeVar("M", bound=BaseModel)
Key = tuple[str, ...]

_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def load_config(model_cls: type[M], files: Sequence[Path] = (), overrides: Sequence[str] = ()) -> M:
    """``model_cls`` from TOML ``files`` (later ones win) and ``a.b=c`` overrides (these win most).

    An override's value is read as TOML and, if it is not TOML or does not fit where its raw text
    would, as a bare string. ConfigError (one line): file or override, key, value, expectation.
    """
    merged = _Merged(model_cls)
    for path in files:
        merged.add_file(Path(path))
    for override in overrides:
        merged.add_override(override)
    try:
        return model_cls.model_validate(merged.data)
    except ValidationError as error:
        raise explain(error, model_cls, merged.data, merged.sources) from None


@dataclass
class _Merged:
    """The raw tables so far and where each key came from."""

    model_cls: type[BaseModel]
    data: dict[str, Any] = field(default_factory=dict)
    sources: dict[Key, str] = field(default_factory=dict)

    def add_file(self, path: Path) -> None:
        self._merge(self.data, read_toml(path), (), [self.model_cls], str(path))

    def _merge(
        self,
        target: dict[str, Any],
        table: dict[str, Any],
        prefix: Key,
        models: Sequence[type[BaseModel]],
        source: str,
    ) -> None:
        for name, value in table.items():
            key = (*prefix, name)
            sections = sections_of(annotation_at(models, (name,)))
            if isinstance(value, dict) and sections:
                self.sources.setdefault(key, source)
                if not isinstance(target.get(name), dict):
                    target[name] = {}
                self._merge(target[name], value, key, sections, source)
            else:
                target[name] = value
                self.sources[key] = source

    def add_override(self, override: str) -> None:
        source = f"--set {override}"
        dotted, equals, raw = override.partition("=")
        key = _parse_key(dotted.strip()) if equals else None
        if not key:
            raise ConfigError(
                f"{source}: expected KEY=VALUE with a dotted key, like rounds.num_rounds=3"
            )
        target = self.data
        models: Sequence[type[BaseModel]] = [self.model_cls]
        for depth, name in enumerate(key[:-1], start=1):
            if name not in target and not sections_of(annotation_at(models, key[:depth])):
                target[name] = self._default_table(key[:depth])
            target = target.setdefault(name, {})
            if not isinstance(target, dict):
                raise ConfigError(
                    f"{source}: {'.'.join(key[:depth])} is {target!r}, not a table, "
                    f"so it has no key {key[depth]!r}"
                )
        target[key[-1]] = _parse_value(raw.strip(), annotation_at(models, key))
        # what files said below a section that is replaced whole is gone
        for known in [known for known in self.sources if known[: len(key)] == key]:
            del self.sources[known]
        self.sources[key] = source

    def _default_table(self, key: Key) -> dict[str, Any]:
        """The default of a free table that no file set, so that an override edits one entry."""
        models: Sequence[type[BaseModel]] = [self.model_cls]
        for name in key[:-1]:
            models = sections_of(annotation_at(models, (name,)))
        for model in models:
            if key[-1] in model.model_fields:
                default = model.model_fields[key[-1]].get_default(call_default_factory=True)
                if isinstance(default, dict):
                    return deepcopy(default)
        return {}


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; ConfigError names file, line and column."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a TOML configuration file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is not UTF-8; expected a TOML file in UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected a readable TOML file") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        place = _PLACE.search(message)
        lines = text.split("\n")
        line, column = len(lines), len(lines[-1]) + 1
        if place and place[1]:
            line, column = int(place[1]), int(place[2])
        reason = _PLACE.sub("", message)
        raise ConfigError(f"{path}:{line}:{column}: not TOML: {reason}") from None


def _parse_key(dotted: str) -> Key | None:
    """TOML key syntax (quotes allowed); None when it is not a key."""
    try:
        table: Any = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:
        return None
    key: list[str] = []
    while isinstance(table, dict):
        if len(table) != 1:
            return None
        name = next(iter(table))
        key.append(name)
        table = table[name]
    return tuple(key)


def _parse_value(raw: str, annotation: Any) -> Any:
    try:
        value = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    if set(value) != {"value"}:
        return raw
    value = value["value"]
    # `--set run.name=7` means the name "7": take the raw text where only that fits the field
    if annotation is not None and not _fits(value, annotation) and _fits(raw, annotation):
        return raw
    return value


def _fits(value: Any, annotation: Any) -> bool:
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError:
        return False
    return True
