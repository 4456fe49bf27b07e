"""ToolTable: the tools of a task, looked up by name, their validators compiled once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sandbox.calls.schema import CompiledSchema
from sandbox.errors import TaskError
from sandbox.tool_spec import ToolSpec


class ToolTable:
    """Immutable after construction; share it between the sessions of a family."""

    def __init__(self, tools: Iterable[ToolSpec], forbidden: Iterable[str] = ()) -> None:
        """TaskError for a duplicate name or a schema that is not JSON Schema."""
        self._tools: dict[str, ToolSpec] = {}
        self._schemas: dict[str, CompiledSchema] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise TaskError(f"tool {tool.name!r} is defined twice; rename one")
            self._tools[tool.name] = tool
            self._schemas[tool.name] = CompiledSchema(tool.schema, f"tool {tool.name!r}")
        self.forbidden = frozenset(forbidden)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def __getitem__(self, name: str) -> ToolSpec:
        return self._tools[name]

    def schema(self, name: str) -> CompiledSchema:
        """Compiled schema of a registered tool."""
        return self._schemas[name]

    @property
    def allowed(self) -> list[str]:
        """Names the model may call, sorted."""
        return sorted(name for name in self._tools if name not in self.forbidden)
