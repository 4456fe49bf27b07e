"""A small stand-in for pytest inside a verifier's box, which has no network to install it from.

Runs test functions and methods of the files given, with module fixtures, ``tmp_path``,
``pytest.raises``, ``approx``, ``skip``, ``fail`` and ``mark.parametrize``; exit status 0 when all
pass. Anything else of pytest makes the test that uses it fail. Standard library only; run as a
file with ``python3 -I``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """Raised by pytest.skip."""


class _Mark:
    """pytest.mark: parametrize is kept, any other mark changes nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def mark(*args: Any, **options: Any) -> Any:
            if name != "parametrize" and len(args) == 1 and callable(args[0]) and not options:
                return args[0]

            def decorate(function: Any) -> Any:
                if name == "parametrize":
                    function.__dict__.setdefault("cases", []).append(args[:2])
                if name == "skip":
                    function.__dict__["skipped"] = True
                return function

            return decorate

        return mark


class _Approx:
    def __init__(self, value: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:
        self.value, self.rel, self.abs = value, rel, abs

    def __eq__(self, other: Any) -> bool:
        if isinstance(self.value, list | tuple):
            return len(other) == len(self.value) and all(
                _Approx(mine, self.rel, self.abs) == theirs
                for mine, theirs in zip(self.value, other, strict=True)
            )
        return math.isclose(self.value, other, rel_tol=self.rel, abs_tol=self.abs)

    __hash__ = None  # type: ignore[assignment]


@contextlib.contextmanager
def _raises(kind: Any, match: str | None = None) -> Iterator[types.SimpleNamespace]:
    import re

    info = types.SimpleNamespace(value=None)
    try:
        yield info
    except kind as error:
        info.value = error
        assert match is None or re.search(match, str(error)), f"{error} does not match {match}"
        return
    raise AssertionError(f"did not raise {kind}")


def _module() -> types.ModuleType:
    module = types.ModuleType("pytest")

    def fixture(function: Any = None, **options: Any) -> Any:
        def mark(marked: Any) -> Any:
            marked.__dict__["is_fixture"] = True
            return marked

        return mark if function is None else mark(function)

    def skip(reason: str = "", **options: Any) -> None:
        raise Skipped(reason)

    def fail(reason: str = "", **options: Any) -> None:
        raise AssertionError(reason)

    module.__dict__.update(
        fixture=fixture, skip=skip, fail=fail, raises=_raises, approx=_Approx, mark=_Mark()
    )
    return module


def run_file(path: Path, names: set[str]) -> list[tuple[str, str]]:
    """(test, "" or what went wrong) for every test of a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, f"{path} cannot be loaded"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        return [(str(path), traceback.format_exc(limit=-2))]
    fixtures = {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__dict__", {}).get("is_fixture")
    }
    results = []
    for name, function in _tests(module):
        if names and name not in names and name.split("::")[-1] not in names:
            continue
        for case in _cases(function):
            results.append((f"{path.name}::{name}", _run(function, case, fixtures)))
    return results


def _tests(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(module).items()):
        if name.startswith("test") and inspect.isfunction(value):
            yield name, value
        elif name.startswith("Test") and inspect.isclass(value):
            instance = value()
            for inner in dir(value):
                if inner.startswith("test"):
                    yield f"{name}::{inner}", getattr(instance, inner)


def _cases(function: Any) -> list[dict[str, Any]]:
    combined: list[dict[str, Any]] = [{}]
    for names, values in getattr(function, "cases", []):
        keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else names
        rows = [value if len(keys) > 1 else (value,) for value in values]
        combined = [
            {**made, **dict(zip(keys, row, strict=True))} for made in combined for row in rows
        ]
    return combined


def _run(function: Any, arguments: dict[str, Any], fixtures: dict[str, Any]) -> str:
    if getattr(function, "skipped", False):
        return ""
    made: dict[str, Any] = dict(arguments)
    open_generators: list[Any] = []

    def provide(name: str) -> Any:
        if name not in made:
            if name == "tmp_path":
                made[name] = Path(tempfile.mkdtemp())
            elif name in fixtures:
                wanted = inspect.signature(fixtures[name]).parameters
                value = fixtures[name](**{key: provide(key) for key in wanted})
                if inspect.isgenerator(value):
                    open_generators.append(value)
                    value = next(value)
                made[name] = value
            else:
                raise AssertionError(f"fixture {name!r} does not exist here")
        return made[name]

    try:
        function(**{name: provide(name) for name in inspect.signature(function).parameters})
    except Skipped:
        return ""
    except BaseException:
        return traceback.format_exc(limit=-2)
    finally:
        for generator in open_generators:
            with contextlib.suppress(StopIteration):
                next(generator)
    return ""


def main(words: list[str]) -> int:
    """Paths are files, folders or ``file::test``; options are ignored. ``PYTHONPATH``, which an
    isolated interpreter leaves out, comes last: nothing there hides the standard library."""
    sys.path += filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    sys.modules["pytest"] = _module()
    files: list[tuple[Path, set[str]]] = []
    for word in words:
        if word.startswith("-") or "=" in word:
            continue
        place, _, name = word.partition("::")
        path = Path(place)
        if path.is_dir():
            files += [(found, set()) for found in sorted(path.rglob("test_*.py"))]
        elif path.suffix == ".py":
            files.append((path, {name} if name else set()))
    results = [result for path, names in files for result in run_file(path.resolve(), names)]
    for name, problem in results:
        print("PASSED" if not problem else "FAILED", name, problem.strip()[-400:])  # noqa: T201
    return 0 if results and not any(problem for _, problem in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
