"""Scoring far warm tokens by the top two bits of their codes (facts/kv-attention.md 2.2)."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.code_scan.reference import code_scan_reference
from engine.kernels.dispatch import Implementation, runs_triton
from engine.kernels.tiered import TieredLayer


def code_scan(
    q: Tensor,
    layer: TieredLayer,
    starts: Tensor,
    scale: float,
    share: bool = True,
    implementation: Implementation = "auto",
) -> Tensor:
    """q [N, A, D], starts int64 [N]: first position of each context's window -> scores fp32
    [N, G, 32 J], a group's heads sharing their largest one, or [N, A, 32 J] without ``share``.

    Warm positions of [32, start) have about scale * q.k, see engine.attention.codes; both
    implementations and the native library give the same bits. Everything else has -inf: absent
    blocks, and hot tokens before the window, which are few and candidates without a scan."""
    if runs_triton(implementation, q):
        from engine.kernels.code_scan.kernel import code_scan_triton

        return code_scan_triton(q, layer, starts, scale, share)
    return code_scan_reference(q, layer, starts, scale, share)
