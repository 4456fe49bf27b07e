"""Call arguments: JSON text, then keys and types by the schema, then JSON Schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sandbox.calls.fit import Fitted, fit
from sandbox.calls.json_text import JsonProblem, JsonText, read_json
from sandbox.calls.policy import KeyTier
from sandbox.calls.schema import CompiledSchema
from sandbox.calls.types import CallError, CallErrorCode


@dataclass(frozen=True, slots=True)
class Arguments:
    """A valid arguments object and the repair tags it took."""

    value: dict[str, Any]
    repairs: tuple[str, ...] = ()


def parse_arguments(
    text: str,
    schema: CompiledSchema,
    *,
    tier: KeyTier = KeyTier.FUZZY,
    repair: bool = True,
    truncated: bool = False,
    aliases: Mapping[str, Iterable[str]] | None = None,
    words: frozenset[str] = frozenset(),
) -> Arguments | CallError:
    """Arguments object of a call, or ``bad_json`` / ``bad_arguments``. Never raises.

    ``repair`` False: the text must be right as it is. ``tier``, ``aliases`` (property -> further
    names) and ``words`` (tokens of the loaded tools): see ``sandbox.calls.keys``. ``truncated``:
    the writer was cut off.
    """
    read = parse_object(text, repair=repair, truncated=truncated)
    if isinstance(read, CallError):
        return read
    if schema.is_valid(read.value) and not (repair and read.whole_floats):
        return Arguments(read.value, read.repairs)
    if not repair:
        return _bad_arguments(schema, Fitted(read.value))
    # a float such as 3.0 is a valid integer, so parts that hold one must be looked into
    skip = None if read.whole_floats else schema.part_is_valid
    fitted = fit(read.value, schema.closed, tier, aliases, words, skip)
    undo_misfits(fitted, schema)
    if not schema.is_valid(fitted.value):
        return _bad_arguments(schema, fitted)
    return Arguments(fitted.value, (*read.repairs, *fitted.repairs))


def parse_object(
    text: str, *, repair: bool = True, truncated: bool = False
) -> JsonText | CallError:
    """A JSON object within the limits, not yet held against a schema."""
    read = read_json(text, repair=repair, truncated=truncated)
    if isinstance(read, JsonProblem):
        return _bad_json(read.reason, read.message)
    if not isinstance(read.value, dict):
        return _bad_json("args_not_object", "arguments must be one JSON object, like {}")
    return read


def undo_misfits(fitted: Fitted, schema: CompiledSchema) -> None:
    """Take back every renamed key whose value the property does not take."""
    if not fitted.renames or schema.is_valid(fitted.value):
        return
    wrong = schema.paths_of_errors(fitted.value)
    for rename in reversed(fitted.renames):
        place = (*rename.path, rename.name)
        if any(path[: len(place)] == place for path in wrong):
            rename.undo()
            fitted.tags.pop(rename.tag, None)


def _bad_arguments(schema: CompiledSchema, fitted: Fitted) -> CallError:
    line, details = schema.problems(fitted.value, fitted.odd_keys)
    return CallError(CallErrorCode.BAD_ARGUMENTS, f"bad_arguments: {line}", details=details)


def _bad_json(reason: str, message: str) -> CallError:
    return CallError(CallErrorCode.BAD_JSON, f"bad_json: {message}", details=(reason,))
