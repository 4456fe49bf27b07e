"""Runs kernels in Triton's interpreter, in a process of its own.

TRITON_INTERPRET must be set before triton is imported, and here some other test may have done that
already; nor should the variable leak into what other tests start. So a child is asked, by pickle
over pipes. On a machine with a GPU kernels run there instead, in this process.

    python -m tests.engine.kernels.interpreter    reads (function name, arguments) until the end
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor


class Kernels:
    """``run("engine.kernels.lse_merge:lse_merge", ...)`` calls it with implementation="triton".

    ``tiles`` {kernel: {constant: size}} makes tiles smaller than on a GPU: the interpreter's time
    goes with their number of elements where a tile is sorted.
    """

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        """Of the last call."""
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, function: str, *arguments: Any, **named: Any) -> Any:
        if torch.cuda.is_available():
            moved = _moved((arguments, named), "cuda")
            return self._result(_call(function, *moved))
        child = self._started()
        assert child.stdin is not None and child.stdout is not None
        pickle.dump((function, arguments, named), child.stdin)
        child.stdin.flush()
        return self._result(pickle.load(child.stdout))

    def close(self) -> None:
        """The child has nothing to lose: taking torch and triton down in order takes seconds."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()

    def _result(self, answer: tuple[Any, Counter[str]]) -> Any:
        result, self.launches = answer
        if isinstance(result, Exception):
            raise result
        return _moved(result, "cpu")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self._child = subprocess.Popen(
                # numpy warns where a GPU gives infinity in silence
                [sys.executable, "-W", "ignore::RuntimeWarning", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=Path(__file__).parents[3],
                env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            )
        return self._child


def _call(
    function: str, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, Counter[str]]:
    from engine.kernels.launch import SETTINGS, Setting, counted, override

    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    with ExitStack() as stack:
        for kernel, sizes in named.pop("tiles", {}).items():
            old = SETTINGS[kernel]
            new = Setting(old.num_warps, old.num_stages, {**old.sizes, **sizes})
            stack.enter_context(override(kernel, new))
        launches = stack.enter_context(counted())
        try:
            result = call(*arguments, **named, implementation="triton")
            if result is None:  # in place: give back what it wrote to
                result = arguments
        except Exception as error:
            result = error
    return result, launches


def _moved(x: Any, device: str) -> Any:
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, tuple | list):
        return type(x)(_moved(part, device) for part in x)
    if isinstance(x, dict):
        return {name: _moved(part, device) for name, part in x.items()}
    if is_dataclass(x) and not isinstance(x, type):
        return type(x)(**{f.name: _moved(getattr(x, f.name), device) for f in fields(x)})
    return x


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    while True:
        try:
            function, arguments, named = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(_call(function, arguments, named), answers)
        answers.flush()


if __name__ == "__main__":
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever a kernel prints must not end up in an answer
    serve(sys.stdin.buffer, out)
