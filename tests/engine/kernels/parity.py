"""Comparing a kernel and its torch twin with fp64, and making inputs for both."""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = 4 * 2.0**-24
"""Relative error anything may have: four roundings of fp32, for when torch's is 0 by luck."""


def assert_as_good(ours: Tensor, torchs: Tensor, exact: Tensor, what: str = "result") -> None:
    """The kernel's error is at most twice that of torch in fp32, both against fp64. Infinities must
    be the same everywhere."""
    assert ours.shape == torchs.shape == exact.shape, f"{what}: {ours.shape}, {torchs.shape}"
    endless = ~exact.isfinite()
    assert torch.equal(ours[endless].double(), exact[endless]), f"{what}: infinities differ"
    ours, torchs, exact = (x[~endless].double() for x in (ours, torchs, exact))
    if not exact.numel():
        return
    error, allowed = errors(ours, torchs, exact)
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"


def errors(ours: Tensor, torchs: Tensor, exact: Tensor) -> tuple[float, float]:
    """Largest error, and what is allowed."""
    assert ours.isfinite().all(), "a kernel gave NaN or infinity"
    largest = float(exact.abs().max())
    theirs = float((torchs - exact).abs().max())
    return float((ours - exact).abs().max()), max(2 * theirs, FLOOR * largest)


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
