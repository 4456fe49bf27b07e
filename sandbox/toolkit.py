"""What a task's tools.py may import, on the host and in the box. Standard library only.

Inside the box this file is shipped as text and registered under the same name, so that
``from sandbox.toolkit import ToolError, tool, workdir`` works in both places.

A tools.py holds ``@tool`` functions (arguments by keyword, text back) and may define
``setup(data)``, which builds the episode's world in ``workdir()``, and ``end_state()``, a JSON
object that the verifier reads. A verify.py defines ``verify(final_text, end_state, data)`` and
answers ``{"correctness": float, "reasons": [str, ...]}``.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import importlib.machinery
import importlib.util
import itertools
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WORKDIR: contextvars.ContextVar[Path] = contextvars.ContextVar("workdir")
_EPISODE: contextvars.ContextVar[_Episode] = contextvars.ContextVar("episode")
_FIRST_S = 1767225600.0
"""2026-01-01T00:00:00Z"""


class ToolError(Exception):
    """Raised by a tool to tell the model, in one line, why the call has no result."""


def tool(
    function: Callable[..., Any] | None = None,
    *,
    effect: str = "read",
    idempotent: bool = False,
    aliases: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """Mark a function as callable by the model. The options (``key_aliases``, ``result_schema``,
    ``result_aliases`` and ``loop`` too) are fields of ToolSpec, read from the syntax tree."""

    def mark(marked: Callable[..., Any]) -> Callable[..., Any]:
        marked.__dict__["parl_tool"] = {
            "effect": effect,
            "idempotent": idempotent,
            "aliases": aliases,
            **options,
        }
        return marked

    return mark if function is None else mark(function)


def workdir() -> Path:
    """The episode's only writable directory; empty before ``setup``."""
    return _WORKDIR.get()


class _Episode:
    """Clock and identifiers of one episode, both a function of its data and of how often they were
    asked."""

    def __init__(self, data: dict[str, Any]) -> None:
        text = json.dumps(data, sort_keys=True, default=str)
        self.seed = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        self.ids = itertools.count()
        self.seconds = itertools.count()
        start = data.get("now", _FIRST_S)
        self.start_s = float(start) if isinstance(start, int | float) else _FIRST_S


def now() -> float:
    """Seconds since 1970 by the episode's own clock: it starts at ``data["now"]`` (else at the
    beginning of 2026) and moves on by a second with each reading, so that equal calls in equal
    instances read equal times."""
    episode = _EPISODE.get()
    return episode.start_s + next(episode.seconds)


def new_id(prefix: str = "") -> str:
    """``prefix`` and 16 hex digits, never twice in an episode, the same in every episode of an
    instance."""
    episode = _EPISODE.get()
    number = str(next(episode.ids)).encode()
    return prefix + hashlib.sha256(episode.seed + number).hexdigest()[:16]


def clip(text: str, max_bytes: int) -> str:
    """``text`` within ``max_bytes`` of UTF-8, cut with a marker; clipping twice changes nothing."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode()
    marker = f"\n[cut: {len(data)} bytes]"
    return data[: max(0, max_bytes - len(marker))].decode("utf-8", "ignore") + marker


def run(
    module: TaskModule, directory: str | Path, method: str, params: dict[str, Any]
) -> dict[str, Any]:
    """One request against a module: ``{"value": ...}``, with ``error`` "tool_error" for a ToolError
    and "crash" for any other exception (a crash of the task's code is data, not ours to raise)."""
    workdir = Path(directory)
    try:
        if method == "start":
            module.setup(workdir, params["data"])
            return {"value": None}
        if method == "call":
            text = module.call(workdir, params["tool"], params["arguments"])
            return {"value": clip(text, params["max_output_bytes"])}
        if method == "state_digest":
            return {"value": module.state_digest(workdir, params["function"])}
        if method == "end_state":
            return {"value": module.end_state(workdir)}
        if method == "verify":
            return {
                "value": module.verify(params["final_text"], params["end_state"], params["data"])
            }
        return {"value": f"unknown method {method}", "error": "crash"}
    except ToolError as refusal:
        return {"value": clip(str(refusal), 1000), "error": "tool_error"}
    except Exception as error:
        return {"value": type(error).__name__, "error": "crash"}


class _TextImporter:
    """Finder and loader of modules that exist as text only."""

    def __init__(self, sources: dict[str, tuple[bool, str]]) -> None:
        self._sources = sources

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        if name not in self._sources:
            return None
        return importlib.util.spec_from_loader(
            name,
            self,  # type: ignore[arg-type]
            origin=f"<{name}>",
            is_package=self._sources[name][0],
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """The default module."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module's text."""
        source = self._sources[module.__name__][1]
        exec(compile(source, f"<{module.__name__}>", "exec", dont_inherit=True), module.__dict__)


def install_packages(sources: dict[str, tuple[bool, str]]) -> None:
    """Make ``{module: (is a package, source)}`` importable (in the box; see sandbox.packages)."""
    if sources:
        sys.meta_path.append(_TextImporter(sources))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=64)
def _compiled(source: str, name: str) -> types.CodeType:
    """A namespace is made per episode, its code only once."""
    return compile(source, f"<{name}>", "exec")


class TaskModule:
    """A tools.py or verify.py, executed in its own namespace."""

    def __init__(self, source: str, name: str) -> None:
        """``name`` is what tracebacks show; no file is read."""
        self._module = types.ModuleType(name)
        exec(_compiled(source, name), self._module.__dict__)
        self._episode = _Episode({})

    def setup(self, workdir: Path, data: dict[str, Any]) -> None:
        """Build the world; a module without ``setup`` needs none."""
        self._episode = _Episode(data)
        function = self._module.__dict__.get("setup")
        if function is not None:
            self._run(workdir, function, {"data": data})

    def call(self, workdir: Path, tool: str, arguments: dict[str, Any]) -> str:
        """Text answer of a tool; whatever it raises comes through."""
        function = self._module.__dict__.get(tool)
        if function is None or "parl_tool" not in function.__dict__:
            raise ToolError(f"{tool} is not a tool of this task")
        return str(self._run(workdir, function, arguments))

    def state_digest(self, workdir: Path, name: str) -> str:
        """Value of the module's function ``name`` as text."""
        return str(self._run(workdir, self._module.__dict__[name], {}))

    def end_state(self, workdir: Path) -> dict[str, Any]:
        """What the verifier may see of the world; {} for a module without ``end_state``."""
        function = self._module.__dict__.get("end_state")
        return {} if function is None else self._run(workdir, function, {})

    def verify(self, final_text: str, end_state: dict[str, Any], data: dict[str, Any]) -> Any:
        """The raw answer of verify.py, not yet checked."""
        return self._module.__dict__["verify"](
            final_text=final_text, end_state=end_state, data=data
        )

    def _run(self, workdir: Path, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        token, other = _WORKDIR.set(workdir), _EPISODE.set(self._episode)
        try:
            return function(**arguments)
        finally:
            _WORKDIR.reset(token)
            _EPISODE.reset(other)
