"""Call arguments: strict JSON within limits, then JSON Schema."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from sandbox.calls.schema import CompiledSchema
from sandbox.calls.types import CallError, CallErrorCode, quote

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_KEYS = 256
"""Of one object."""

# Strings are skipped whole, so brackets inside them do not count. The closing quote is optional
# and the repetition possessive: no quote is ever matched twice, so the scan is linear.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Refused(ValueError):
    """A value JSON's grammar allows to pass Python's parser but we do not."""


def parse_arguments(text: str, schema: CompiledSchema) -> dict[str, Any] | CallError:
    """Arguments object of a call, or ``bad_json`` / ``bad_arguments``.

    Refused: NaN, Infinity, numbers that overflow (1e999), duplicate keys, lone surrogates, anything
    but an object; more than 1 MiB, 32 levels or 256 keys in an object. Never raises.
    """
    parsed = parse_object(text)
    if isinstance(parsed, CallError):
        return parsed
    problem = schema.problem(parsed)
    if problem is not None:
        return CallError(CallErrorCode.BAD_ARGUMENTS, f"bad_arguments: {problem}")
    return parsed


def parse_object(text: str) -> dict[str, Any] | CallError:
    """Strict JSON object within the limits, not yet validated against a schema."""
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        return _bad_json(f"arguments are longer than {MAX_BYTES} bytes")
    depth = deepest(text)
    if depth > MAX_DEPTH:
        return _bad_json(f"arguments are nested {depth} deep; at most {MAX_DEPTH}")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
        )
        if _has_lone_surrogate(text, value):
            raise _Refused("arguments hold half of a surrogate pair")
    except json.JSONDecodeError as error:
        return _bad_json(f"arguments are not valid JSON: {error.msg} at character {error.pos}")
    except _Refused as refused:
        return _bad_json(str(refused))
    except ValueError:  # CPython refuses integers of more than 4300 digits
        return _bad_json("arguments hold a number with too many digits")
    if not isinstance(value, dict):
        return _bad_json("arguments must be one JSON object, like {}")
    return value


def deepest(text: str) -> int:
    """Deepest nesting of brackets outside strings; linear in the length of ``text``."""
    depth = most = 0
    for match in _TOKEN.finditer(text):
        bracket = match[0]
        if bracket in ("[", "{"):
            depth += 1
            most = max(most, depth)
        elif bracket in ("]", "}"):
            depth -= 1
    return most


def _bad_json(what: str) -> CallError:
    return CallError(CallErrorCode.BAD_JSON, f"bad_json: {what}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise _Refused(f"an object has {len(pairs)} keys; at most {MAX_KEYS}")
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _Refused(f"key {quote(key)} is given twice")
        result[key] = value
    return result


def _constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"number {quote(text)} is too large")
    return value


def _has_lone_surrogate(text: str, value: Any) -> bool:
    """Such text cannot be stored as UTF-8. Only a raw or escaped surrogate can bring one in."""
    if _SURROGATE.search(text):
        return True
    if "\\ud" not in text and "\\uD" not in text:
        return False
    return _SURROGATE.search(json.dumps(value, ensure_ascii=False)) is not None
