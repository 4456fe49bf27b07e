"""MRI values as JSON and back: what HTTP and Triton's tensors of bytes carry.

An array is ``{"dtype": "<i4", "shape": [3], "data": base64 of its little-endian bytes}``; a field
that is None is left out, one that a newer peer added is skipped. Errors keep their class.
"""

from __future__ import annotations

import base64
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from engine import errors
from engine.errors import EngineError

T = TypeVar("T")
_ERRORS: dict[str, type[Exception]] = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, EngineError)
}
_ERRORS["ValueError"] = ValueError
_ARRAY = {"dtype", "shape", "data"}
_KINDS = "biuf"
"""Kinds of numpy dtypes that cross: never objects."""


def encode(value: Any) -> Any:
    """A value of engine.runtime.types as what ``json`` can write."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {name: encode(field) for name, field in fields.items() if field is not None}
    if isinstance(value, np.ndarray):
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        data = base64.b64encode(little.tobytes()).decode()
        return {"dtype": little.dtype.str, "shape": list(value.shape), "data": data}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    return value


def decode(kind: type[T], data: Any) -> T:
    """``data`` as the dataclass ``kind``; EngineError when a field without default is missing."""
    if not isinstance(data, Mapping):
        raise EngineError(f"the peer sent {type(data).__name__}, expected a {kind.__name__}")
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = {f.name: _value(data[f.name], str(f.type)) for f in fields if f.name in data}
    # a field that may be None was left out when it was
    for field in fields:
        if field.name not in known and field.default is dataclasses.MISSING:
            if "None" in str(field.type):
                known[field.name] = None
            elif field.default_factory is dataclasses.MISSING:
                raise EngineError(
                    f"the peer's {kind.__name__} lacks {field.name}; does it speak MRI 1.x?"
                )
    return kind(**known)


def _value(value: Any, annotation: str) -> Any:
    if isinstance(value, dict):
        return decode_array(value) if value.keys() == _ARRAY else value
    if isinstance(value, list):
        return frozenset(value) if annotation.startswith("frozenset") else _tupled(value)
    return value


def _tupled(value: Any) -> Any:
    return tuple(_tupled(item) for item in value) if isinstance(value, list) else value


def decode_array(data: Mapping[str, Any]) -> np.ndarray:
    """Writable, in the machine's byte order; EngineError for anything but plain numbers."""
    try:
        dtype = np.dtype(data["dtype"])
        if dtype.kind not in _KINDS:
            raise ValueError(f"dtype {dtype} is not a number")
        raw = base64.b64decode(data["data"], validate=True)
        array = np.frombuffer(raw, dtype).reshape(data["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"the peer sent an array that cannot be read: {error}") from error
    return array.astype(dtype.newbyteorder("="))


# -- errors -------------------------------------------------------------------------------------


def encode_error(error: Exception) -> dict[str, Any]:
    """Class, one line, and what else a caller acts on. Anything that is no error of MRI's is an
    EngineError: a bug of the engine, not of its caller."""
    known = next((k for k in type(error).__mro__ if _ERRORS.get(k.__name__) is k), None)
    message = " ".join(str(error).split()) or type(error).__name__
    if known is None:
        known, message = EngineError, f"{type(error).__name__}: {message}; a bug, see the log"
    data: dict[str, Any] = {"type": known.__name__, "message": message}
    if isinstance(error, errors.TryAgainLater):
        data["retry_after_s"] = float(error.retry_after_s)
    return data


def decode_error(data: Any) -> Exception:
    """The same class with the same message."""
    if not isinstance(data, Mapping) or not isinstance(data.get("message"), str):
        return EngineError(f"the peer failed and did not say how: {str(data)[:200]}")
    kind = _ERRORS.get(str(data.get("type")), EngineError)
    message = str(data["message"])
    if issubclass(kind, errors.TryAgainLater):
        return kind(message, float(data.get("retry_after_s", 1.0)))
    return kind(message)
