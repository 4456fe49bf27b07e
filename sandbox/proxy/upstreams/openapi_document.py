"""Reads an OpenAPI 3.0 or 3.1 document into operations with one JSON Schema of arguments each.

References may only point into the document itself: one that leads to a file or URL would make the
proxy read what the document's writer chose.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sandbox.proxy.errors import ProxyConfigError
from sandbox.proxy.upstreams.openapi_load import load_document

_VERBS = ("get", "put", "post", "delete", "options", "head", "patch")
_COMPONENT = "#/components/schemas/"
_DROPPED = frozenset({"xml", "externalDocs", "discriminator", "example", "deprecated", "nullable"})
_PLAIN_OBJECT = {"type", "properties", "required", "title", "description", "example", "xml"}
_MAX_DEFS = 400


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter; ``argument`` is its key among the tool's arguments."""

    argument: str
    name: str
    place: str
    style: str
    explode: bool
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. ``body_keys``: arguments that are fields of the JSON body; ``body_whole``:
    the argument that is the whole body."""

    name: str
    method: str
    path: str
    description: str
    schema: dict[str, Any]
    parameters: tuple[Parameter, ...]
    body_keys: tuple[str, ...] = ()
    body_whole: str | None = None


@dataclass(frozen=True, slots=True)
class Document:
    operations: tuple[Operation, ...]
    server_url: str | None
    skipped: tuple[str, ...]
    """Operations that cannot become tools, each with its reason."""


def read_document(path: Path) -> Document:
    """Operations of a JSON or YAML file; ProxyConfigError names the file and the place."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProxyConfigError(f"{path}: {error}; expected an OpenAPI document in UTF-8") from None
    try:
        return _parsed(text)
    except ProxyConfigError as error:
        raise ProxyConfigError(f"{path}: {error}") from None


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Document:
    """Cached: validation takes a tenth of a second and more, many worlds read one document."""
    root = load_document(text)
    version = str(root["openapi"])
    operations, skipped, names = [], [], set()
    for route, item in root.get("paths", {}).items():
        item = _resolved(root, item)
        for verb in _VERBS:
            if verb not in item:
                continue
            try:
                operation = _operation(root, route, verb, item, version)
            except ValueError as error:
                skipped.append(f"{verb.upper()} {route}: {error}")
                continue
            if operation.name in names:
                raise ProxyConfigError(f"two operations are named {operation.name}")
            names.add(operation.name)
            operations.append(operation)
    servers = root.get("servers") or [{}]
    return Document(tuple(operations), _server_url(servers[0]), tuple(skipped))


def _resolved(root: dict[str, Any], node: Any) -> Any:
    """``node`` with its own reference followed; inner references stay."""
    for _ in range(32):
        if not isinstance(node, dict) or "$ref" not in node:
            return node
        target: Any = root
        for part in node["$ref"][2:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or part not in target:
                raise ValueError(f"$ref {node['$ref']} leads nowhere")
            target = target[part]
        node = target
    raise ValueError("a circle of $ref")


def _operation(
    root: dict[str, Any], route: str, verb: str, item: dict[str, Any], version: str
) -> Operation:
    raw = item[verb]
    schemas = _Schemas(root, version)
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for declared in (*item.get("parameters", ()), *raw.get("parameters", ())):
        parameter = _resolved(root, declared)
        merged[parameter["in"], parameter["name"]] = parameter
    names = [name for _, name in merged]
    properties: dict[str, Any] = {}
    required: list[str] = []
    parameters = []
    for (place, name), declared in merged.items():
        if place == "header" and name.lower() in ("accept", "content-type", "authorization"):
            continue  # OpenAPI 3: these are not parameters
        argument = name if names.count(name) == 1 else f"{place}_{name}"
        parameters.append(_parameter(argument, declared))
        properties[argument] = _described(schemas.converted(_schema_of(declared)), declared)
        if declared.get("required") or place == "path":
            required.append(argument)
    body_keys, body_whole = _body(root, raw, schemas, properties, required)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    if required:
        schema["required"] = required
    definitions = schemas.definitions()
    if definitions:
        schema["$defs"] = definitions
    return Operation(
        name=_tool_name(raw.get("operationId") or re.sub(r"[\W_]+", "_", f"{verb}_{route}")),
        method=verb.upper(),
        path=route,
        description=" ".join((raw.get("summary") or raw.get("description") or "").split())[:1000],
        schema=schema,
        parameters=tuple(parameters),
        body_keys=body_keys,
        body_whole=body_whole,
    )


def _parameter(argument: str, declared: dict[str, Any]) -> Parameter:
    place = declared["in"]
    style = declared.get("style") or {"path": "simple", "header": "simple"}.get(place, "form")
    return Parameter(
        argument=argument,
        name=declared["name"],
        place=place,
        style=style,
        explode=declared.get("explode", style == "form"),
        as_json="content" in declared,
    )


def _schema_of(declared: dict[str, Any]) -> dict[str, Any]:
    if "content" in declared:
        return next(iter(declared["content"].values())).get("schema", {})
    return declared.get("schema", {})


def _described(schema: Any, declared: dict[str, Any]) -> Any:
    text = declared.get("description")
    if text and isinstance(schema, dict) and "description" not in schema and "$ref" not in schema:
        return {**schema, "description": " ".join(text.split())[:500]}
    return schema


def _body(
    root: dict[str, Any],
    raw: dict[str, Any],
    schemas: _Schemas,
    properties: dict[str, Any],
    required: list[str],
) -> tuple[tuple[str, ...], str | None]:
    """Adds the body's arguments: its fields side by side with the parameters where nothing clashes,
    else one argument ``body``."""
    body = _resolved(root, raw.get("requestBody"))
    if body is None:
        return (), None
    media = next((kind for kind in body["content"] if _is_json(kind)), None)
    if media is None:
        if not body.get("required"):
            return (), None
        raise ValueError(f"needs a body of {', '.join(body['content'])}; only JSON can be sent")
    declared = body["content"][media].get("schema", {})
    shape = _resolved(root, declared)
    fields = shape.get("properties", {}) if isinstance(shape, dict) else {}
    flat = (
        fields
        and set(shape)
        <= {"type", "properties", "required", "title", "description", "example", "xml"}
        and not set(fields) & set(properties)
    )
    if not flat:
        properties["body"] = schemas.converted(declared)
        if body.get("required"):
            required.append("body")
        return (), "body"
    for name, field_schema in fields.items():
        properties[name] = schemas.converted(field_schema)
    required.extend(shape.get("required", ()) if body.get("required") else ())
    return tuple(fields), None


def _is_json(media: str) -> bool:
    kind = media.partition(";")[0].strip().lower()
    return kind in ("application/json", "*/*", "application/*") or kind.endswith("+json")


class _Schemas:
    """Turns OpenAPI schemas into JSON Schema 2020-12 and gathers the components they use."""

    def __init__(self, root: dict[str, Any], version: str) -> None:
        self._root = root
        self._is_30 = version.startswith("3.0")
        self._wanted: dict[str, str] = {}

    def converted(self, schema: Any) -> Any:
        """``schema`` with references into ``$defs`` and 3.0 keywords in their 2020-12 form."""
        if isinstance(schema, list):
            return [self.converted(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            return {"$ref": f"#/$defs/{self._want(schema['$ref'])}"}
        out = {}
        for key, value in schema.items():
            if key in _DROPPED or key.startswith("x-"):
                continue
            if key in ("properties", "patternProperties", "$defs"):
                out[key] = {name: self.converted(item) for name, item in value.items()}
            elif key in ("enum", "const", "default", "examples", "required", "dependentRequired"):
                out[key] = value
            else:
                out[key] = self.converted(value)
        return self._from_30(schema, out) if self._is_30 else out

    def _from_30(self, schema: dict[str, Any], out: dict[str, Any]) -> dict[str, Any]:
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if out.get(exclusive) is True and bound in out:
                out[exclusive] = out.pop(bound)
            elif isinstance(out.get(exclusive), bool):
                del out[exclusive]
        if schema.get("nullable") and isinstance(out.get("type"), str):
            out["type"] = [out["type"], "null"]
            if "enum" in out and None not in out["enum"]:
                out["enum"] = [*out["enum"], None]
        return out

    def _want(self, reference: str) -> str:
        name = reference.removeprefix(_COMPONENT) if reference.startswith(_COMPONENT) else reference
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", name.lstrip("#/"))
        self._wanted[name] = reference
        return name

    def definitions(self) -> dict[str, Any]:
        """Every component reachable from what was converted. ValueError when there are too many."""
        done: dict[str, Any] = {}
        while len(done) < len(self._wanted):
            if len(self._wanted) > _MAX_DEFS:
                raise ValueError(f"its schema uses more than {_MAX_DEFS} components")
            for name, reference in list(self._wanted.items()):
                if name not in done:
                    done[name] = self.converted(_resolved(self._root, {"$ref": reference}))
        return done


def _tool_name(text: str) -> str:
    """Letters, digits, _ and -, at most 64 characters, as model APIs want it."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", text).strip("_")
    return name[:64] or "operation"


def _server_url(server: dict[str, Any]) -> str | None:
    url = server.get("url")
    if not url:
        return None
    for name, variable in server.get("variables", {}).items():
        url = url.replace("{" + name + "}", str(variable.get("default", "")))
    return url if urlsplit(url).scheme in ("http", "https") else None
