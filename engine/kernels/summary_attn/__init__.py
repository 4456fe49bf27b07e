"""Attention over summaries that stand for tokens nobody retrieved (facts/kv-attention.md 3)."""

from __future__ import annotations

from torch import Tensor

from engine.kernels.dispatch import Implementation, runs_triton
from engine.kernels.summary_attn.reference import summary_attn_reference


def summary_attn(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    counts: Tensor,
    scale: float,
    weight: float,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """q [N, A, D], keys [N, G, J, D], values [N, G, J, V], counts [N, A, J] whole numbers: tokens
    of block j that query head a did not read elsewhere -> o fp32 [N, A, V], lse fp32 [N, A].

    Logits are scale * q.k + log count + log weight. A count of 0 hides a summary; weight 0 hides
    all, bit for bit as if this part did not exist."""
    if runs_triton(implementation, q):
        from engine.kernels.summary_attn.kernel import summary_attn_triton

        return summary_attn_triton(q, keys, values, counts, scale, weight)
    return summary_attn_reference(q, keys, values, counts, scale, weight)
