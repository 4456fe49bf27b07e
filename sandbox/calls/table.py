"""ToolTable: the tools of a task, looked up by name, their validators compiled once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sandbox.calls.schema import CompiledSchema
from sandbox.calls.words import style_form, tokens
from sandbox.errors import TaskError
from sandbox.tool_spec import ToolSpec


class ToolTable:
    """Immutable after construction; share it between the sessions of a family."""

    def __init__(self, tools: Iterable[ToolSpec], forbidden: Iterable[str] = ()) -> None:
        """TaskError for a duplicate name or alias, or a schema that is not JSON Schema."""
        self._tools: dict[str, ToolSpec] = {}
        self._schemas: dict[str, CompiledSchema] = {}
        self._results: dict[str, CompiledSchema] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise TaskError(f"tool {tool.name!r} is defined twice; rename one")
            self._tools[tool.name] = tool
            self._schemas[tool.name] = CompiledSchema(tool.schema, f"tool {tool.name!r}")
            if tool.result_schema is not None:
                self._results[tool.name] = CompiledSchema(
                    tool.result_schema, f"result of tool {tool.name!r}", close=False
                )
        self.forbidden = frozenset(forbidden)
        self.aliases = _aliases(self._tools.values())
        """Other name -> tool."""
        self.words = frozenset(
            word for tool in self._tools.values() for word in _words(tool.schema)
        )
        """Tokens of every parameter name: real words, hence never typos of one another."""

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def __getitem__(self, name: str) -> ToolSpec:
        return self._tools[name]

    def schema(self, name: str) -> CompiledSchema:
        """Compiled schema of a registered tool's arguments."""
        return self._schemas[name]

    def result_schema(self, name: str) -> CompiledSchema | None:
        """Compiled schema of a registered tool's answer, if it declares one."""
        return self._results.get(name)

    @property
    def allowed(self) -> list[str]:
        """Names the model may call, sorted."""
        return sorted(name for name in self._tools if name not in self.forbidden)


def _aliases(tools: Iterable[ToolSpec]) -> dict[str, str]:
    found: dict[str, str] = {}
    names = [tool.name for tool in tools]
    for tool in tools:
        for alias in tool.aliases:
            if found.get(alias, tool.name) != tool.name or (alias in names and alias != tool.name):
                raise TaskError(
                    f"tool {tool.name!r}: alias {alias!r} also names another tool; drop it"
                )
            found[alias] = tool.name
    return found


def _words(schema: Any) -> Iterator[str]:
    """Tokens and whole forms of the property names anywhere in a schema."""
    if isinstance(schema, list):
        for item in schema:
            yield from _words(item)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key == "properties" and isinstance(value, dict):
                for name in value:
                    yield from tokens(name)
                    yield style_form(name)
            yield from _words(value)
