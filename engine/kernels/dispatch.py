"""Which implementation an op runs: ``auto | torch | triton``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal

from torch import Tensor

from engine.errors import NotSupportedError

Implementation = Literal["auto", "torch", "triton"]

_auto: list[Implementation] = ["auto"]
"""What ``auto`` means, innermost ``using`` last."""


@contextmanager
def using(implementation: Implementation) -> Iterator[None]:
    """Ops called with ``auto`` in this block run ``implementation``, in all threads of the process;
    for tests and benches."""
    _auto.append(implementation)
    try:
        yield
    finally:
        _auto.pop()


def runs_triton(implementation: Implementation, tensor: Tensor) -> bool:
    """Whether an op on ``tensor`` takes the kernel. NotSupportedError when it was asked for and
    cannot run."""
    if implementation == "auto":
        implementation = _auto[-1]
    if implementation == "auto":
        return tensor.is_cuda and find_spec("triton") is not None
    if implementation == "torch":
        return False
    if find_spec("triton") is None:
        raise NotSupportedError(
            "implementation 'triton' was asked for, but triton is not installed; "
            "pip install 'parl-agent[gpu]', or use 'torch'"
        )
    if not tensor.is_cuda:
        _check_interpreter(tensor)
    return True


def _check_interpreter(tensor: Tensor) -> None:
    from engine.kernels.launch import compiling, interpreting

    if not interpreting() and not compiling():
        raise NotSupportedError(
            f"implementation 'triton' was asked for on a {tensor.device.type} tensor; expected "
            "CUDA, or TRITON_INTERPRET=1 in the environment before triton is imported (slow, for "
            "tests)"
        )
