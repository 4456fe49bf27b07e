"""RawCall -> DecodedCall | CallError: the whole way a call goes before it may run."""

from __future__ import annotations

from dataclasses import replace

from sandbox.calls.arguments import parse_arguments
from sandbox.calls.names import parse_name
from sandbox.calls.policy import KeyTier, RepairPolicy
from sandbox.calls.table import ToolTable
from sandbox.calls.types import CallError, CallErrorCode, DecodedCall, quote
from sandbox.session import RawCall

DEFAULT_POLICY = RepairPolicy()


def decode(
    raw: RawCall,
    tools: ToolTable,
    policy: RepairPolicy = DEFAULT_POLICY,
    cap: KeyTier = KeyTier.FUZZY,
) -> DecodedCall | CallError:
    """Name, JSON, keys, types and schema; a pure function that never raises.

    ``policy``: what the run allows; ``cap``: how far the task lets keys be matched. What the model
    wrote (``raw``) is never changed; it alone is trained on.
    """
    name = parse_name(raw.name_text, list(tools), tools.aliases, repair=policy.repairs)
    if isinstance(name, CallError):
        return name
    if name.tool in tools.forbidden:
        return CallError(
            CallErrorCode.FORBIDDEN_TOOL,
            f"forbidden_tool: {quote(name.tool)} may not be called in this task; "
            f"tools: {', '.join(tools.allowed)}",
            tool=name.tool,
        )
    spec = tools[name.tool]
    arguments = parse_arguments(
        raw.arguments_text,
        tools.schema(name.tool),
        tier=policy.key_tier(spec.effect, cap),
        repair=policy.repairs,
        truncated=raw.finish_reason == "length",
        aliases=spec.key_aliases,
        words=tools.words,
    )
    if isinstance(arguments, CallError):
        return replace(arguments, tool=name.tool)
    return DecodedCall(name.tool, arguments.value, (*name.repairs, *arguments.repairs))
