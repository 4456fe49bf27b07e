"""Which files a tau2 domain needs to run in a box, and whether a box can run them.

Read, never run: the imports of tools.py and data_model.py decide.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.importers.base import read_text

HERE = Path(__file__).parent
_STANDARD = frozenset(
    {"__future__", "abc", "base64", "calendar", "collections", "copy", "dataclasses", "datetime"}
    | {"decimal", "enum", "functools", "hashlib", "itertools", "json", "math", "operator", "random"}
    | {"re", "statistics", "string", "textwrap", "time", "typing", "uuid"}
)
_KNOWN = {
    "pydantic": {"BaseModel", "Field", "ConfigDict", "ValidationError"},
    "tau2.environment.toolkit": {"ToolKitBase", "ToolType", "is_tool"},
    "tau2.environment.db": {"DB"},
    "loguru": {"logger"},
}
_OWN = re.compile(r"^(?:tau2\.domains\.\w+\.|\.)(data_model|utils)$")


@dataclass(slots=True)
class DomainSources:
    """``texts``: module -> source. ``missing``: why a box cannot run them; ``notes``: what is
    different when it does."""

    texts: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_sources(domain: Path) -> DomainSources:
    """tools.py, data_model.py and utils.py of a domain's folder, as far as they are there."""
    found = DomainSources()
    for name in ("utils", "data_model", "tools"):
        path = domain / f"{name}.py"
        if path.is_file():
            found.texts[name] = _placed(read_text(path))
    has_db = False
    for name, text in found.texts.items():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError) as error:
            found.missing.append(f"{name}.py is not valid Python: {error}")
            continue
        _imports(name, tree, found)
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        has_db = has_db or any(ast.unparse(base) == "DB" for c in classes for base in c.bases)
    if not has_db:
        found.missing.append("no class derives from DB")
    if "pydantic" in "".join(found.texts.values()):
        found.notes.append("pydantic: models are read by a small stand-in, Field's limits are not")
    return found


def world_text(sources: DomainSources, part: str) -> str:
    """The stand-ins, the domain's sources, and tau2_tools.py or tau2_verify.py."""
    texts = {**sources.texts, "small_models": (HERE / "small_models.py").read_text("utf-8")}
    head = (HERE / "tau2_world.py").read_text(encoding="utf-8")
    stored = json.dumps(texts, ensure_ascii=True)
    return f"{head}\n\nSOURCES.update(json.loads({stored!r}))\n\n\n" + (HERE / part).read_text(
        encoding="utf-8"
    )


def _placed(text: str) -> str:
    """Imports of the domain's own modules name the one domain of a box."""
    return re.sub(r"\btau2\.domains\.\w+\.(data_model|utils)\b", r"tau2.domains.domain.\1", text)


def _imports(name: str, tree: ast.Module, found: DomainSources) -> None:
    """Every import that runs, against what a box has."""
    for node in ast.walk(_without_main(tree)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] not in _STANDARD:
                    found.missing.append(f"{name}.py imports {alias.name}")
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = {alias.name for alias in node.names}
            if own := _OWN.match(module):
                if own[1] in found.texts:
                    continue
                if own[1] == "data_model":
                    found.missing.append("data_model.py is not beside tools.py")
                else:
                    found.notes.append(
                        f"{own[1]}.py is not beside tools.py: {', '.join(sorted(names))} is None"
                    )
            elif module in _KNOWN:
                for unknown in sorted(names - _KNOWN[module]):
                    found.missing.append(f"{name}.py imports {unknown} of {module}")
            elif module.partition(".")[0] not in _STANDARD:
                found.missing.append(f"{name}.py imports {module}")


def _without_main(tree: ast.Module) -> ast.Module:
    """The module as an import runs it."""
    kept = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))
    ]
    return ast.Module(body=kept, type_ignores=[])
