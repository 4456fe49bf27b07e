"""The kernel bench: its inputs are what the ops take, and without a GPU it says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.bench.kernel_cases import Size, cases
from engine.bench.kernels import check_gpu
from engine.errors import NotSupportedError
from engine.kernels.launch import SETTINGS


def tensors(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple):
        return [tensor for part in result for tensor in tensors(part)]
    return []


@pytest.mark.slow
def test_every_case_runs_on_its_twin():
    size = Size.smallest()
    named = [case.kernel for case in cases(size, "cpu", torch.bfloat16)]
    # gate and up, down and the sum are one op
    assert set(named) | {"moe_down", "moe_combine", "kv_quantise_values"} == set(SETTINGS)
    for case in cases(size, "cpu", torch.bfloat16):
        for tensor in tensors(case.run("torch")):
            assert not tensor.is_floating_point() or not tensor.isnan().any(), case.kernel


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_line():
    with pytest.raises(NotSupportedError, match="no CUDA device") as caught:
        check_gpu()
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_kernel_compiles_for_a_gpu_that_is_not_there(tmp_path: Path):
    """One small kernel; all of them take minutes: parl bench kernels --compile 90."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "parl.cli.main", "bench", "kernels"]
    done = subprocess.run(
        [*command, "--compile", "90", "--only", "lse_merge"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    assert "lse_merge" in done.stdout


@pytest.mark.gpu
@pytest.mark.slow
def test_the_table_is_printed():
    from engine.bench.kernels import measure

    lines = list(measure(Size.smallest(), num_repeats=3, sweep=False))
    assert len(lines) == len(cases(Size.smallest(), "cuda", torch.bfloat16)) + 2
