"""ConfigModel, the base of every section, and how to find the field behind a dotted key."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict


class ConfigModel(BaseModel):
    """Frozen, refuses unknown keys; the string under a field is its documentation."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        # infinity is a meaningful limit; the default would write it as null
        ser_json_inf_nan="constants",
    )


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Models a value of this annotation may be: [M] for M and M | None, several for a union."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return sections_of(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [model for arm in get_args(annotation) for model in sections_of(arm)]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return []


def annotation_at(models: Sequence[type[BaseModel]], path: Sequence[str | int]) -> Any:
    """Annotation of the field at ``path`` below one of ``models``; None where there is none.

    Steps through sections, lists and tables: ``("groups", 2, "lr")``.
    """
    if not path:
        return None
    for model in models:
        field = model.model_fields.get(str(path[0]))
        if field is None:
            continue
        annotation, rest = field.annotation, path[1:]
        while rest and not sections_of(annotation):
            annotation, rest = _element(annotation), rest[1:]
        if not rest:
            return annotation
        found = annotation_at(sections_of(annotation), rest)
        if found is not None:
            return found
    return None


def _element(annotation: Any) -> Any:
    """Annotation of what a list, tuple or table holds; None when it is none of these."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _element(args[0])
    if origin in (Union, types.UnionType):
        found = [_element(arm) for arm in args if arm is not type(None)]
        return found[0] if len(found) == 1 else None
    if origin is dict:
        return args[1]
    return args[0] if origin in (list, tuple, set, frozenset) and args else None
