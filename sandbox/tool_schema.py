"""tools.py -> ToolSpecs by reading its syntax tree; the author's code is never run on the host.

A tool is a module-level function decorated with ``@tool`` or ``@tool(effect=..., ...)``. Its
arguments' annotations give the JSON Schema, its docstring the description. The decorator's options
are fields of ToolSpec, written as literals:

    @tool(effect="read", result_schema={"type": "object", "properties": {"城市": {}}},
          loop={"poll": {"min_interval_s": 5, "max": 30}, "ignore_result": ["messageId"]})
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sandbox.errors import TaskError
from sandbox.tool_spec import ToolSpec

_SCALARS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_DECORATOR_KEYS = frozenset(
    {"effect", "idempotent", "aliases", "key_aliases", "result_schema", "result_aliases", "loop"}
)
_SPEC = TypeAdapter(ToolSpec)


def tools_from_source(
    source: str,
    file: str = "tools/tools.py",
    *,
    allow_async: bool = False,
    allow_none: bool = False,
) -> tuple[ToolSpec, ...]:
    """ToolSpecs in the order of the file; TaskError names file and line.

    ``allow_async``: coroutines are tools too (in the proxy; a box runs plain functions only).
    ``allow_none``: the file may hold no tool (the proxy serves them all).
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise TaskError(f"{file}: not valid Python: {error}") from error
    tools = []
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        options = _tool_options(node, file)
        if options is None:
            continue
        if isinstance(node, ast.AsyncFunctionDef) and not allow_async:
            raise TaskError(f"{file}:{node.lineno}: tool {node.name!r} is async; use a plain def")
        description = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0]
        fields = {
            "name": node.name,
            "description": " ".join(description.split()),
            "schema": _schema_of(node, file),
            **options,
        }
        tools.append(_spec(fields, f"{file}:{node.lineno}"))
    if not tools and not allow_none:
        raise TaskError(f"{file}: no tool found; decorate a module-level function with @tool")
    return tuple(tools)


def _spec(fields: dict[str, Any], where: str) -> ToolSpec:
    try:
        return _SPEC.validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise TaskError(
            f"{where}: tool {fields['name']!r}: option {key!r} = {first['input']!r:.60}: "
            f"{first['msg']}"
        ) from error


def _tool_options(node: ast.FunctionDef | ast.AsyncFunctionDef, file: str) -> dict[str, Any] | None:
    """Keyword arguments of the ``@tool`` decorator, or None if the function has none."""
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        name = call.func if call else decorator
        if not (isinstance(name, ast.Name) and name.id == "tool"):
            continue
        options: dict[str, Any] = {}
        for keyword in call.keywords if call else []:
            if keyword.arg not in _DECORATOR_KEYS:
                raise TaskError(
                    f"{file}:{node.lineno}: @tool has no option {keyword.arg!r}; "
                    f"known: {', '.join(sorted(_DECORATOR_KEYS))}"
                )
            options[keyword.arg] = _literal(keyword.value, file)
        return options
    return None


def _literal(node: ast.expr, file: str) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise TaskError(
            f"{file}:{node.lineno}: {ast.unparse(node)!r} must be a literal (it is read, not run)"
        ) from error


def _schema_of(node: ast.FunctionDef | ast.AsyncFunctionDef, file: str) -> dict[str, Any]:
    arguments = node.args
    if arguments.vararg or arguments.posonlyargs:
        raise TaskError(f"{file}:{node.lineno}: tool {node.name!r} may not take *args or /")
    if arguments.kwarg and not (arguments.args or arguments.kwonlyargs):
        # names that are no Python identifiers: the schema then stands in [metadata.parl.tools]
        return {"type": "object"}
    if arguments.kwarg:
        raise TaskError(f"{file}:{node.lineno}: tool {node.name!r} mixes ** with named arguments")
    plain = arguments.args
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
    pairs = [
        *zip(plain, defaults + list(arguments.defaults), strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    properties: dict[str, Any] = {}
    for argument, default in pairs:
        if argument.annotation is None:
            raise TaskError(
                f"{file}:{node.lineno}: argument {argument.arg!r} of tool {node.name!r} has no "
                "type; annotate it (str, int, float, bool, list[...], dict, Literal[...])"
            )
        properties[argument.arg] = _type_schema(argument.annotation, file)
        if default is not None:
            properties[argument.arg]["default"] = _literal(default, file)
    return {
        "type": "object",
        "properties": properties,
        "required": [argument.arg for argument, default in pairs if default is None],
        "additionalProperties": False,
    }


def _type_schema(node: ast.expr, file: str) -> dict[str, Any]:
    match node:
        case ast.Name(id=name) if name in _SCALARS:
            return {"type": _SCALARS[name]}
        case ast.Name(id="list"):
            return {"type": "array"}
        case ast.Name(id="dict") | ast.Subscript(value=ast.Name(id="dict")):
            return {"type": "object"}
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            return {"type": "array", "items": _type_schema(item, file)}
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=choices)):
            return {"enum": [_literal(choice, file) for choice in choices]}
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choice):
            return {"enum": [_literal(choice, file)]}
        case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Constant(value=None)):
            return {"anyOf": [_type_schema(left, file), {"type": "null"}]}
    raise TaskError(
        f"{file}:{node.lineno}: type {ast.unparse(node)!r} has no JSON Schema here; use str, int, "
        "float, bool, list[...], dict, Literal[...] or `X | None`"
    )
