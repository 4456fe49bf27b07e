"""JSON Schema of a tool's arguments, compiled once; errors as one line for the model."""

from __future__ import annotations

import difflib
from itertools import islice
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError

from sandbox.calls.types import quote
from sandbox.errors import TaskError

_SHOWN_KEYS = 12
_LOOKED_AT = 32
"""Errors are generated lazily; a megabyte of wrong array items must not make a million of them."""


class CompiledSchema:
    """A checked JSON Schema (2020-12). ``problem`` is a pure function of the value."""

    def __init__(self, schema: dict[str, Any], owner: str = "tool") -> None:
        """TaskError if ``schema`` is not a JSON Schema; ``owner`` names it in the message."""
        try:
            Draft202012Validator.check_schema(schema)
        except SchemaError as error:
            raise TaskError(f"{owner}: not a JSON Schema: {error.message}") from error
        self.schema = schema
        self._validator = Draft202012Validator(schema)

    def problem(self, value: dict[str, Any]) -> str | None:
        """What is wrong with ``value``, or None: key, expected type, nearest known key."""
        errors = list(islice(self._validator.iter_errors(value), _LOOKED_AT))
        if not errors:
            return None
        unknown = [error for error in errors if error.validator == "additionalProperties"]
        return _explain((unknown or errors)[0])


def _explain(error: ValidationError) -> str:
    where = ".".join(str(part) for part in error.absolute_path)
    key = f"key {quote(where)}" if where else "arguments"
    instance: Any = error.instance
    rule: Any = error.validator_value
    match error.validator:
        case "additionalProperties":
            return _unknown_key(error.schema, instance, where)
        case "required":
            missing = [name for name in rule if name not in instance]
            return f"missing key {', '.join(quote(name) for name in missing[:_SHOWN_KEYS])}"
        case "type":
            return f"{key}: expected {rule}, got {_shown(instance)}"
        case "enum":
            choices = ", ".join(quote(str(choice)) for choice in rule[:_SHOWN_KEYS])
            return f"{key}: expected one of {choices}, got {_shown(instance)}"
    return f"{key}: {_shown(instance)} breaks the rule {error.validator} = {quote(str(rule))}"


def _unknown_key(schema: Any, instance: dict[str, Any], where: str) -> str:
    known = sorted(schema.get("properties", {}))
    extra = next((name for name in instance if name not in known), "")
    near = difflib.get_close_matches(extra[:64], known, n=1, cutoff=0.6)
    hint = (
        f"did you mean {quote(near[0])}?"
        if near
        else f"known keys: {', '.join(known[:_SHOWN_KEYS]) or '(none)'}"
    )
    inside = f" in {quote(where)}" if where else ""
    return f"unknown key {quote(extra)}{inside}: {hint}"


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    return quote(str(value)).strip("'") if value is not None else "null"
