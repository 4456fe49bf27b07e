"""RawCall -> DecodedCall | CallError: the whole way a call goes before it may run."""

from __future__ import annotations

from dataclasses import replace

from sandbox.calls.arguments import parse_arguments
from sandbox.calls.names import parse_name
from sandbox.calls.table import ToolTable
from sandbox.calls.types import CallError, CallErrorCode, DecodedCall, quote
from sandbox.session import RawCall


def decode(raw: RawCall, tools: ToolTable) -> DecodedCall | CallError:
    """Name, JSON and schema, strictly; a pure function that never raises."""
    name = parse_name(raw.name_text, list(tools))
    if isinstance(name, CallError):
        return name
    if name in tools.forbidden:
        return CallError(
            CallErrorCode.FORBIDDEN_TOOL,
            f"forbidden_tool: {quote(name)} may not be called in this task; "
            f"tools: {', '.join(tools.allowed)}",
            tool=name,
        )
    arguments = parse_arguments(raw.arguments_text, tools.schema(name))
    if isinstance(arguments, CallError):
        return replace(arguments, tool=name)
    return DecodedCall(name, arguments)
