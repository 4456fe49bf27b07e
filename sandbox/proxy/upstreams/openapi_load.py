"""Text of an OpenAPI document -> JSON values, checked.

References may only point into the document itself: one that leads to a file or URL would make the
proxy read what the document's writer chose.
"""

from __future__ import annotations

import json
from typing import Any, cast

from sandbox.proxy.errors import ProxyConfigError

_MAX_NODES = 500_000
"""A few lines of YAML can stand for billions of nodes."""


def load_document(text: str) -> dict[str, Any]:
    """The document as JSON values, valid, without references to the outside. ProxyConfigError."""
    try:
        root = json.loads(text) if text.lstrip().startswith("{") else _load_yaml(text)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ProxyConfigError(f"neither JSON nor YAML: {reason}") from None
    if not isinstance(root, dict):
        raise ProxyConfigError(f"expected an object, found {type(root).__name__}")
    try:
        root = _as_json(root, [_MAX_NODES])
    except RecursionError:
        raise ProxyConfigError("nested too deeply, or an anchor inside itself") from None
    version = str(root.get("openapi", ""))
    if not version.startswith(("3.0", "3.1")):
        raise ProxyConfigError(
            f"openapi = {version or root.get('swagger')!r}; expected an OpenAPI 3.0 or 3.1 "
            "document; convert it first"
        )
    refuse_outside_references(root)
    _validate(root)
    return root


def _load_yaml(text: str) -> Any:
    import yaml

    try:
        # dates stay text: JSON has none
        loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
        plain = type("PlainLoader", (loader,), {"yaml_implicit_resolvers": _no_dates(loader)})
        return yaml.load(text, Loader=cast(Any, plain))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _no_dates(loader: Any) -> dict[str, list[Any]]:
    return {
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
        for first, pairs in loader.yaml_implicit_resolvers.items()
    }


def _as_json(value: Any, left: list[int]) -> Any:
    """YAML has keys that are no strings, such as the status 200."""
    left[0] -= 1
    if left[0] < 0:
        raise ProxyConfigError(f"more than {_MAX_NODES} values, anchors counted as often as used")
    if isinstance(value, dict):
        return {_key(name): _as_json(item, left) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_json(item, left) for item in value]
    return value


def _key(name: Any) -> str:
    return str(name).lower() if isinstance(name, bool) else str(name)


def _validate(root: dict[str, Any]) -> None:
    from openapi_spec_validator import OpenAPIV30SpecValidator, OpenAPIV31SpecValidator

    is_30 = str(root["openapi"]).startswith("3.0")
    validator = OpenAPIV30SpecValidator if is_30 else OpenAPIV31SpecValidator
    first = next(iter(validator(root).iter_errors()), None)
    if first is not None:
        place = "/".join(str(part) for part in first.absolute_path)
        reason = " ".join(first.message.split())[:300]
        raise ProxyConfigError(f"not valid at {place or 'the root'}: {reason}")


def refuse_outside_references(value: Any) -> None:
    """ProxyConfigError for a ``$ref`` that is not a place in the same document."""
    if isinstance(value, dict):
        reference = value.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#/"):
            raise ProxyConfigError(
                f"$ref {reference!r} leads out of the document; bundle it into one file"
            )
        for item in value.values():
            refuse_outside_references(item)
    elif isinstance(value, list):
        for item in value:
            refuse_outside_references(item)
