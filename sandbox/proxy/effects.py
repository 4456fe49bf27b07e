"""Effect class of a tool: what the author declared, else what the protocol says. Pure.

facts/sandboxes.md 2, point 3. The order is read < write < destructive.
"""

from __future__ import annotations

from dataclasses import dataclass

from sandbox.tool_spec import Effect

_RANK: dict[Effect, int] = {"read": 0, "write": 1, "destructive": 2}
_VERBS: dict[str, tuple[Effect, bool]] = {
    "GET": ("read", True),
    "HEAD": ("read", True),
    "OPTIONS": ("read", True),
    "PUT": ("destructive", True),
    "DELETE": ("destructive", True),
    "POST": ("write", False),
    "PATCH": ("write", False),
}


@dataclass(frozen=True, slots=True)
class Hints:
    """MCP annotations as the server sent them; None = not sent."""

    read_only: bool | None = None
    destructive: bool | None = None
    idempotent: bool | None = None


def tighter(first: Effect, second: Effect) -> Effect:
    """The one of the two that allows less."""
    return max(first, second, key=_RANK.__getitem__)


def effect_of_verb(
    verb: str, declared: Effect | None, idempotent: bool | None
) -> tuple[Effect, bool]:
    """(effect, idempotent) of an OpenAPI operation; an unknown verb is destructive."""
    effect, repeatable = _VERBS.get(verb.upper(), ("destructive", False))
    return (
        declared if declared is not None else effect,
        idempotent if idempotent is not None else repeatable,
    )


def effect_of_hints(
    hints: Hints, declared: Effect | None, idempotent: bool | None, trusted: bool
) -> tuple[Effect, bool]:
    """(effect, idempotent) of an MCP tool.

    Annotations are the server's word: a hint that was sent may tighten what the author declared,
    never loosen it, and without a declaration the class is destructive. ``trusted`` is the author
    vouching for the server, then its hints are taken as they are.
    """
    hinted = _effect_of(hints)
    if declared is None:
        effect = hinted or "destructive" if trusted else "destructive"
    else:
        effect = declared if hinted is None else tighter(declared, hinted)
    if effect == "read":
        return effect, True
    if hints.idempotent is False:
        return effect, False
    if idempotent is not None:
        return effect, idempotent
    return effect, bool(trusted and hints.idempotent)


def _effect_of(hints: Hints) -> Effect | None:
    """Class of the hints that were sent; the protocol's defaults fill in for the others."""
    if hints.read_only:
        return "read"
    if hints.destructive is not None:
        return "destructive" if hints.destructive else "write"
    return "destructive" if hints.read_only is False else None
