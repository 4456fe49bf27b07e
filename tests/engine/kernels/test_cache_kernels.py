"""Appending, coding and decoding blocks: kernels give torch's bits."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import NotSupportedError, QuantiseError
from engine.kernels.dispatch import runs_triton, using
from engine.kernels.kv_append import kv_append
from engine.kernels.kv_dequant import dequantise_keys, dequantise_values
from engine.kernels.kv_quantise_block import quantise_keys, quantise_values
from engine.kvcache.quantise import Profile
from tests.engine.kernels.interpreter import Kernels
from tests.engine.kernels.parity import numbers

QUANTISE = "engine.kernels.kv_quantise_block:quantise_"
DEQUANTISE = "engine.kernels.kv_dequant:dequantise_"


def same(ours: Any, torchs: Any) -> None:
    for field in fields(torchs):
        a, b = getattr(ours, field.name), getattr(torchs, field.name)
        assert (a is None) == (b is None), field.name
        if b is not None:
            assert a.dtype == b.dtype and torch.equal(a, b), field.name


def hard_rows(size: int) -> Tensor:
    """[2, 2, 32, size]: large channel means, a constant, a zero and a tiny channel, ties."""
    x = numbers(2, 2, 32, size)
    x += 20 * numbers(1, 2, 1, size, seed=1)
    x[0, :, :, 0] = 3.25
    x[0, :, :, 1] = 0
    x[1, 0] *= 1e-7
    x[1, 1, :, 2] = torch.arange(32) * 0.5
    x[0, 1, 3] = 0
    return x


def check_round_trip(kernels: Kernels, x: Tensor, profile: Profile, what: str) -> None:
    by_torch: Any = {"keys": quantise_keys, "values": quantise_values}[what]
    back: Any = {"keys": dequantise_keys, "values": dequantise_values}[what]
    codes = kernels.run(QUANTISE + what, x, profile)
    same(codes, by_torch(x, profile))
    assert torch.equal(kernels.run(DEQUANTISE + what, codes), back(codes))


def test_keys_become_the_same_codes(kernels: Kernels):
    check_round_trip(kernels, hard_rows(20)[:1], "k8v8", "keys")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["keys", "values"])
@pytest.mark.parametrize("profile", ["k8v8", "k8v4", "literal"])
@pytest.mark.parametrize("size", [4, 36, 128])
def test_every_profile_gives_torchs_bits(kernels: Kernels, what: str, profile: Profile, size: int):
    check_round_trip(kernels, hard_rows(size), profile, what)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e4])
def test_extreme_sizes_give_torchs_bits(kernels: Kernels, scale: float):
    x = numbers(1, 1, 32, 8, scale=scale)
    for profile in ("k8v8", "k8v4", "literal"):
        check_round_trip(kernels, x.clamp(-60000, 60000), profile, "values")
        keys = x.clamp(-500, 500) if profile == "literal" else x.clamp(-60000, 60000)
        check_round_trip(kernels, keys, profile, "keys")


@pytest.mark.slow
def test_no_blocks_and_16_bit_input(kernels: Kernels):
    empty = torch.zeros(0, 2, 32, 8)
    check_round_trip(kernels, empty, "k8v8", "keys")
    check_round_trip(kernels, empty, "k8v4", "values")
    check_round_trip(kernels, hard_rows(8).bfloat16(), "k8v8", "keys")
    check_round_trip(kernels, hard_rows(8).half(), "k8v8", "values")


@pytest.mark.slow
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 1e30])
def test_numbers_without_a_code_are_refused(kernels: Kernels, broken: float):
    x = numbers(1, 1, 32, 8)
    x[0, 0, 5, 3] = broken
    for what in ("keys", "values"):
        with pytest.raises(QuantiseError, match=what):
            kernels.run(QUANTISE + what, x)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_put_in_their_slots(kernels: Kernels, dtype: torch.dtype):
    """Skipped rows change nothing; the rest is rounded as torch rounds."""
    k, v = numbers(5, 3, 20), numbers(5, 3, 7)
    slots = torch.tensor([3 * 32 + 31, -1, 0, 33, -1])
    pool_k, pool_v = (torch.full((4, 3, 32, n), torch.nan, dtype=dtype) for n in (20, 7))
    ours = kernels.run("engine.kernels.kv_append:kv_append", pool_k, pool_v, slots, k, v)
    kv_append(pool_k, pool_v, slots, k, v)
    for a, b in zip(ours[:2], (pool_k, pool_v), strict=True):
        assert torch.equal(a.nan_to_num(-9), b.nan_to_num(-9))
    assert int(pool_k.isfinite().all(-1).sum()) == 3 * 3


@pytest.mark.slow
def test_appending_nothing_and_latent_rows(kernels: Kernels):
    pool = torch.zeros(1, 1, 32, 5)
    slots = torch.tensor([7])
    name = "engine.kernels.kv_append:kv_append"
    ours = kernels.run(name, pool, None, slots, numbers(1, 1, 5), None)
    assert torch.equal(ours[0][0, 0, 7], numbers(1, 1, 5)[0, 0])
    kernels.run(name, pool, None, slots[:0], torch.zeros(0, 1, 5), None)
    assert not kernels.launches


def test_the_interpreter_must_be_asked_for():
    """CPU tensors take the twin; asking for a kernel without the interpreter is an error."""
    x = torch.zeros(1)
    assert not runs_triton("auto", x)
    with using("torch"):
        assert not runs_triton("auto", x)
    with pytest.raises(NotSupportedError, match="TRITON_INTERPRET=1"):
        runs_triton("triton", x)
    with using("triton"), pytest.raises(NotSupportedError):
        runs_triton("auto", x)
