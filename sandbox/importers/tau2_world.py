"""A tau2 domain inside a box: its own tools.py over its own data base.

Standard library only; this text stands at the top of the tools.py and verify.py of an imported
task, after ``SOURCES`` (module name -> text of the domain's files and of small_models.py).
"""

from __future__ import annotations

import enum
import hashlib
import json
import sys
import types
from typing import Any

SOURCES: dict[str, str] = {}


class ToolType(enum.Enum):
    READ = "read"
    WRITE = "write"
    THINK = "think"
    GENERIC = "generic"


def is_tool(tool_type: ToolType = ToolType.READ) -> Any:
    """Mark a method as a tool."""

    def mark(function: Any) -> Any:
        function.__dict__["tool_type"] = tool_type
        return function

    return mark


class ToolKitBase:
    """Methods marked with ``is_tool`` over ``db``."""

    def __init__(self, db: Any = None) -> None:
        self.db = db

    @property
    def tools(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for base in reversed(type(self).__mro__)
            for name, value in vars(base).items()
            if isinstance(value, types.FunctionType) and "tool_type" in value.__dict__
        }

    def has_tool(self, name: str) -> bool:
        return name in self.tools

    def tool_type(self, name: str) -> ToolType:
        return self.tools[name].tool_type

    def use_tool(self, name: str, **arguments: Any) -> Any:
        """ValueError for a name that is no tool."""
        if not self.has_tool(name):
            raise ValueError(f"Tool '{name}' not found.")
        return self.tools[name](**arguments)


class _Logger:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


class World:
    """The modules of a domain, loaded once."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.models = _module("pydantic", sources["small_models"])
        base = self.models.BaseModel
        database = _empty("tau2.environment.db", DB=type("DB", (base,), {"__module__": "pydantic"}))
        toolkit = _empty(
            "tau2.environment.toolkit",
            ToolKitBase=ToolKitBase,
            ToolType=ToolType,
            is_tool=is_tool,
        )
        for name in ("tau2", "tau2.environment", "tau2.domains", "tau2.domains.domain"):
            _empty(name)
        _empty("loguru", logger=_Logger())
        assert database and toolkit, "registered for the sources that follow"
        for name in ("utils", "data_model", "tools"):
            place = f"tau2.domains.domain.{name}"
            if name in sources:
                loaded = _module(place, sources[name])
            else:
                loaded = _empty(place)
                loaded.__dict__["__getattr__"] = lambda name: None
        self.kit_class = _find(loaded, ToolKitBase, "is_tool")
        hints = dict(getattr(self.kit_class, "__annotations__", {}))
        named = hints.get("db")
        named = getattr(loaded, named, None) if isinstance(named, str) else named
        self.db_class = named or _find(loaded, database.DB, "DB")

    def kit(self, db: dict[str, Any]) -> Any:
        """The toolkit over a data base."""
        return self.kit_class(self.db_class.model_validate(db))

    def start(self, db: dict[str, Any], initial: dict[str, Any]) -> Any:
        """The toolkit in the task's own initial state: changed data, then actions."""
        kit = self.kit(_merged(db, initial.get("data") or {}))
        for action in initial.get("actions") or []:
            getattr(kit, action["func_name"])(**action.get("arguments", {}))
        return kit

    def text(self, value: Any) -> str:
        """An answer as a model reads it."""
        plain = self.models.dump(value)
        return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)

    def plain(self, kit: Any) -> dict[str, Any]:
        """The data base as JSON."""
        return self.models.dump(kit.db)


def digest(db: dict[str, Any]) -> str:
    """sha256 of the canonical JSON."""
    text = json.dumps(db, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _empty(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(content, __path__=[])
    sys.modules[name] = module
    return module


def _module(name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__["__package__"] = name.rpartition(".")[0]
    sys.modules[name] = module
    exec(compile(source, f"<{name}>", "exec", dont_inherit=True), module.__dict__)
    return module


def _find(module: types.ModuleType, base: type, what: str) -> Any:
    """The last class of a module that derives from ``base``."""
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    ]
    if not found:
        raise RuntimeError(f"tools.py has no class of {what}")
    return found[-1]


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
