"""A small reader of pydantic-like models, for boxes, which hold no compiled packages.

``BaseModel``, ``Field``, ``ConfigDict`` and ``ValidationError`` as far as data bases of tau2's
shape use them: nested models, lists, dicts, unions, literals, enums, defaults, aliases. Types are
checked, constraints of ``Field`` are not. Standard library only; shipped as text.
"""

from __future__ import annotations

import copy
import datetime
import enum
import json
import types
import typing
from typing import Any

_MISSING: Any = object()
ConfigDict = dict


class ValidationError(ValueError):
    """A value does not fit its field."""


class _Default:
    def __init__(self, default: Any, factory: Any, alias: str | None) -> None:
        self.default, self.factory, self.alias = default, factory, alias


def Field(
    default: Any = _MISSING, *, default_factory: Any = None, alias: str | None = None, **_: Any
) -> Any:
    """What a field has when it is not given; descriptions and constraints are dropped."""
    return _Default(_MISSING if default is ... else default, default_factory, alias)


class BaseModel:
    """Fields are the annotations of the class and its bases; unknown keys are dropped."""

    model_config: typing.ClassVar[dict[str, Any]] = {}

    def __init__(self, **data: Any) -> None:
        for name, hint in _fields(type(self)).items():
            default = getattr(type(self), name, _MISSING)
            if not isinstance(default, _Default):
                default = _Default(default, None, None)
            value = data.get(name, _MISSING)
            if value is _MISSING and default.alias is not None:
                value = data.get(default.alias, _MISSING)
            if value is not _MISSING:
                self.__dict__[name] = fit(hint, value, name)
            elif default.factory is not None:
                self.__dict__[name] = default.factory()
            elif default.default is not _MISSING:
                self.__dict__[name] = copy.deepcopy(default.default)
            else:
                raise ValidationError(f"{type(self).__name__}.{name} is missing")

    @classmethod
    def model_validate(cls, value: Any, **_: Any) -> Any:
        return fit(cls, value, cls.__name__)

    @classmethod
    def model_validate_json(cls, text: str, **_: Any) -> Any:
        return cls.model_validate(json.loads(text))

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        plain = {name: dump(self.__dict__[name]) for name in _fields(type(self))}
        return {k: v for k, v in plain.items() if v is not None} if exclude_none else plain

    def model_dump_json(self, *, indent: int | None = None, **options: Any) -> str:
        return json.dumps(self.model_dump(**options), indent=indent)

    def model_copy(self, *, update: dict[str, Any] | None = None, deep: bool = False) -> Any:
        made = copy.deepcopy(self) if deep else copy.copy(self)
        made.__dict__.update(update or {})
        return made

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({inner})"


_HINTS: dict[type, dict[str, Any]] = {}


def _fields(cls: type) -> dict[str, Any]:
    if cls not in _HINTS:
        hints = typing.get_type_hints(cls, include_extras=True)
        _HINTS[cls] = {
            name: hint
            for name, hint in hints.items()
            if typing.get_origin(hint) is not typing.ClassVar and not name.startswith("_")
        }
    return _HINTS[cls]


def dump(value: Any) -> Any:
    """Plain JSON of models and what holds them."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, dict):
        return {str(dump(key)): dump(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [dump(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value


def fit(hint: Any, value: Any, where: str) -> Any:
    """``value`` as ``hint`` says; ValidationError when it cannot be."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, typing.TypeVar):
        return value
    if origin is typing.Annotated:
        return fit(arguments[0], value, where)
    if origin in (typing.Union, types.UnionType):
        return _fit_one(arguments, value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValidationError(f"{where} is {value!r:.60}; expected one of {arguments}")
        return value
    if hint is None or hint is type(None):
        return _checked(value is None, value, where, "None")
    if origin in (list, set, frozenset) or hint in (list, set, frozenset):
        _checked(isinstance(value, list | tuple | set), value, where, "a list")
        inner = arguments[0] if arguments else Any
        return (origin or hint)(fit(inner, item, where) for item in value)
    if origin is tuple:
        inner = [arguments[0]] * len(value) if arguments[-1:] == (...,) else arguments
        return tuple(fit(part, item, where) for part, item in zip(inner, value, strict=True))
    if origin is dict or hint is dict:
        _checked(isinstance(value, dict), value, where, "an object")
        key, item = arguments or (Any, Any)
        return {fit(key, k, where): fit(item, v, f"{where}.{k}") for k, v in value.items()}
    return _fit_class(hint, value, where)


def _fit_one(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    """The first choice that is the value's own type, else the first that takes it."""
    for choice in choices:
        if isinstance(choice, type) and type(value) is choice:
            return value
    for choice in choices:
        try:
            return fit(choice, value, where)
        except (ValidationError, TypeError):
            continue
    raise ValidationError(f"{where} is {value!r:.60}; expected one of {choices}")


def _fit_class(hint: Any, value: Any, where: str) -> Any:
    if not isinstance(hint, type) or (isinstance(value, hint) and hint not in (int, float)):
        return value
    if issubclass(hint, BaseModel):
        _checked(isinstance(value, dict), value, where, hint.__name__)
        return hint(**value)
    if issubclass(hint, enum.Enum):
        return hint(value)
    if issubclass(hint, datetime.date | datetime.time) and isinstance(value, str):
        return hint.fromisoformat(value)
    if hint in (int, float):
        number = not isinstance(value, bool) and isinstance(value, int | float | str)
        _checked(number, value, where, hint.__name__)
        try:
            made = hint(value)
        except ValueError as error:
            raise ValidationError(f"{where} is {value!r:.60}; expected {hint.__name__}") from error
        return _checked(made == value or isinstance(value, str), made, where, hint.__name__)
    return _checked(isinstance(value, hint), value, where, hint.__name__)


def _checked(right: bool, value: Any, where: str, expected: str) -> Any:
    if not right:
        raise ValidationError(f"{where} is {value!r:.60}; expected {expected}")
    return value
