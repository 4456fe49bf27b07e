"""Arguments of an operation -> HttpRequest, by the parameter styles of OpenAPI 3. Pure."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import SplitResult, quote, unquote

from sandbox.proxy.errors import BadArguments
from sandbox.proxy.request import HttpRequest
from sandbox.proxy.upstreams.openapi_document import Operation, Parameter

_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")
_SEPARATOR = {"spaceDelimited": "%20", "pipeDelimited": "%7C", "form": ","}


def build_request(
    operation: Operation,
    server: SplitResult,
    arguments: dict[str, Any],
    headers: dict[str, str],
) -> HttpRequest:
    """The request, without secrets. BadArguments for a value that would change the path's shape or
    break a header."""
    path = operation.path
    query: list[tuple[str, str]] = []
    raw_query: list[str] = []
    sent = dict(headers)
    cookies: list[str] = []
    for parameter in operation.parameters:
        if parameter.argument not in arguments:
            continue
        value = arguments[parameter.argument]
        if parameter.place == "path":
            path = path.replace("{" + parameter.name + "}", _path_value(parameter, value))
        elif parameter.place == "query":
            _add_query(parameter, value, query, raw_query)
        elif parameter.place == "header":
            sent[parameter.name] = _header_value(parameter, value)
        else:
            cookies.append(f"{parameter.name}={quote(_simple(parameter, value), safe='')}")
    if cookies:
        sent["Cookie"] = "; ".join(cookies)
    if "{" in path:
        raise BadArguments(f"{operation.name}: missing a part of the path {operation.path}")
    body, has_body = _body_of(operation, arguments)
    if has_body:
        sent["Content-Type"] = "application/json"
    return HttpRequest(
        method=operation.method,
        scheme=server.scheme,
        host=(server.hostname or "").lower(),
        port=server.port,
        path=quote(server.path.rstrip("/"), safe="/%~") + _quoted_route(path),
        query=tuple(query),
        raw_query="&".join(raw_query) or None,
        headers=tuple(sent.items()),
        body=body,
        has_body=has_body,
    )


def _quoted_route(path: str) -> str:
    return quote(path, safe="/%:@!$&'()*+,;=~")


def _path_value(parameter: Parameter, value: Any) -> str:
    text = _simple(parameter, value)
    # a server may decode before it routes: no separators, no dot segments, however encoded
    plain = unquote(unquote(text))
    if (
        not text
        or plain in (".", "..")
        or any(char in plain for char in "/\\\0")
        or ".." in plain.split("/")
    ):
        raise BadArguments(
            f"{parameter.argument}: {text[:80]!r} cannot be part of a path; expected a name or "
            "number without / or \\"
        )
    quoted = quote(text, safe="~")
    if parameter.style == "label":
        return "." + quoted
    return f";{parameter.name}={quoted}" if parameter.style == "matrix" else quoted


def _add_query(
    parameter: Parameter, value: Any, query: list[tuple[str, str]], raw_query: list[str]
) -> None:
    if parameter.as_json:
        query.append((parameter.name, json.dumps(value, ensure_ascii=False)))
    elif isinstance(value, dict):
        if parameter.style == "deepObject":
            query.extend((f"{parameter.name}[{key}]", _text(item)) for key, item in value.items())
        elif parameter.explode:
            query.extend((str(key), _text(item)) for key, item in value.items())
        else:
            flat = [part for key, item in value.items() for part in (str(key), _text(item))]
            raw_query.append(_joined(parameter, flat))
    elif isinstance(value, list):
        if parameter.explode:
            query.extend((parameter.name, _text(item)) for item in value)
        else:
            raw_query.append(_joined(parameter, [_text(item) for item in value]))
    elif value is not None:
        query.append((parameter.name, _text(value)))


def _joined(parameter: Parameter, parts: list[str]) -> str:
    separator = _SEPARATOR.get(parameter.style, ",")
    return f"{quote(parameter.name, safe='')}=" + separator.join(
        quote(part, safe="") for part in parts
    )


def _header_value(parameter: Parameter, value: Any) -> str:
    text = json.dumps(value) if parameter.as_json else _simple(parameter, value)
    if not _HEADER_VALUE.fullmatch(text):
        raise BadArguments(f"{parameter.argument}: a header takes printable ASCII only")
    return text


def _simple(parameter: Parameter, value: Any) -> str:
    if isinstance(value, list):
        return ",".join(_text(item) for item in value)
    if isinstance(value, dict):
        if parameter.explode:
            return ",".join(f"{key}={_text(item)}" for key, item in value.items())
        return ",".join(f"{key},{_text(item)}" for key, item in value.items())
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _body_of(operation: Operation, arguments: dict[str, Any]) -> tuple[Any, bool]:
    if operation.body_whole is not None:
        return arguments.get(operation.body_whole), operation.body_whole in arguments
    body = {key: arguments[key] for key in operation.body_keys if key in arguments}
    return (body, True) if operation.body_keys else (None, False)
