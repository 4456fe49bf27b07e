"""How fast are the Triton kernels? ``python -m engine.bench.kernels --device cuda``.

Each op at the sizes of ``kernel_cases``, the kernel and its torch twin one after the other in one
process: milliseconds (median of the repeats, GPU events), bytes a second, and how many times longer
the twin takes. ``--sweep`` also times the neighbours of a kernel's setting. ``--compile 90`` needs
no GPU: it compiles every kernel for that CUDA capability and prints what it takes of registers and
shared memory.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from engine.bench.kernel_cases import Case, Size, cases
from engine.errors import EngineError, NotSupportedError

WARPS, STAGES = (2, 4, 8), (1, 2, 3, 4)
"""What a sweep tries around a setting."""


def measure(size: Size, num_repeats: int, sweep: bool, only: str = "") -> Iterator[str]:
    """Lines of the table, as they are measured. NotSupportedError without a GPU or triton."""
    check_gpu()
    properties = torch.cuda.get_device_properties(0)
    yield (
        f"{properties.name}, torch {torch.__version__}, bf16, {size.contexts} contexts of "
        f"{size.context_length}; median of {num_repeats}"
    )
    yield f"{'kernel':<20} {'ms':>9} {'GB/s':>8} {'torch/ours':>11}"
    for case in cases(size, "cuda", torch.bfloat16):
        if only not in case.kernel:
            continue
        ours = _milliseconds(lambda case=case: case.run("triton"), num_repeats)
        twin = _milliseconds(lambda case=case: case.run("torch"), max(3, num_repeats // 10))
        rate = case.num_bytes / ours / 1e6
        yield f"{case.kernel:<20} {ours:9.4f} {rate:8.0f} {twin / ours:11.1f}"
        if sweep:
            yield from _sweep(case, num_repeats)


def check_gpu() -> None:
    from importlib.util import find_spec

    if find_spec("triton") is None:
        raise NotSupportedError("triton is not installed; pip install 'parl-agent[gpu]'")
    if not torch.cuda.is_available():
        raise NotSupportedError(
            "no CUDA device here, so there is nothing to time: kernels run on a CPU only in "
            "Triton's interpreter, which tests use; `--compile 90` works without a GPU"
        )


def compile_all(capability: int, only: str = "") -> Iterator[str]:
    """Lines of a table: every kernel with the constants of an 8B model, compiled and not run."""
    from engine.kernels.launch import SETTINGS, compile_only

    yield "kernel                warps  stages  shared B  registers  spilt B"
    for case in cases(Size.smallest(), "cpu", torch.bfloat16):
        if only not in case.kernel:
            continue
        with compile_only(capability) as done:
            case.run("triton")
        for found in done:
            setting = SETTINGS[found.kernel]
            registers, spilt = _resources(found.binary)
            yield (
                f"{found.kernel:<20} {setting.num_warps:>6} {setting.num_stages:>7} "
                f"{found.shared_bytes:>9} {registers:>10} {spilt:>8}"
            )


def _resources(binary: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of local memory, from the tool that triton brings."""
    import triton

    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, f"cuobjdump said {text!r}"
    return int(found[1]), int(found[2])


def _sweep(case: Case, num_repeats: int) -> Iterator[str]:
    from engine.kernels.launch import SETTINGS, override

    setting = SETTINGS[case.kernel]
    timed: list[tuple[float, str]] = []
    for warps in WARPS:
        for stages in STAGES:
            other = replace(setting, num_warps=warps, num_stages=stages)
            name = f"{warps} warps, {stages} stages"
            try:
                with override(case.kernel, other):
                    time = _milliseconds(lambda: case.run("triton"), num_repeats)
            except Exception as error:  # too many registers or too much shared memory
                yield f"  {name}: {type(error).__name__}"
                continue
            timed.append((time, name))
    for time, name in sorted(timed)[:3]:
        yield f"  {name}: {time:.4f} ms"


def _milliseconds(run: Callable[[], Any], num_repeats: int) -> float:
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(num_repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def main() -> int:
    """Print the table; 1 when this machine cannot make it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda"], default="cuda")
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--only", default="", help="Kernels whose name holds this.")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compile", type=int, default=0, help="A CUDA capability: 80, 90 ...")
    options = parser.parse_args()
    size = Size(contexts=options.contexts, context_length=options.context)
    lines = (
        compile_all(options.compile, options.only)
        if options.compile
        else measure(size, options.repeats, options.sweep, options.only)
    )
    try:
        for line in lines:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
