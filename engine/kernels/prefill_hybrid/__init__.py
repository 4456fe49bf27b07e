"""Attention of many queries a context: sink, window, chosen tokens and tiers of each position, the
same masks that decoding has, so that a learner's forward sees what the rollout saw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.kernels.dispatch import Implementation, runs_triton
from engine.kernels.prefill_hybrid.reference import (
    Visibility,
    pack_positions,
    prefill_hybrid_reference,
)

__all__ = ["Visibility", "pack_positions", "prefill_hybrid"]


def prefill_hybrid(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    warm_k: Tensor,
    warm_v: Tensor,
    selected: Tensor | None,
    firsts: Tensor,
    counts: Tensor,
    see: Visibility,
    scale: float,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """q [N, T, A, D], k and v [N, L, G, D or V] exact, warm_k and warm_v the same after coding and
    decoding -> o fp32 [N, T, A, V], lse fp32 [N, T, A].

    Query i of a context has position firsts[n] + i; queries from counts[n] on are padding and get
    o = 0, lse = -inf. ``selected`` int32 [N, T, H, ceil(L / 32)], see ``pack_positions``, H as in
    ``gathered_attn``; None chooses nothing. A long prompt is fed in chunks of T. Numbers are finite
    up to the longest context. The kernel's backward is the twin's, computed anew."""
    arguments = (q, k, v, warm_k, warm_v, selected, firsts, counts, see, scale)
    if not runs_triton(implementation, q):
        return prefill_hybrid_reference(*arguments)
    result = _Kernel.apply(*arguments)
    assert isinstance(result, tuple), "apply returns what forward returned"
    return result


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        from engine.kernels.prefill_hybrid.kernel import prefill_hybrid_triton

        ctx.save_for_backward(*arguments[:8])
        ctx.rest = arguments[8:]
        return prefill_hybrid_triton(*arguments)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs: list[Any] = [None if t is None else t.detach() for t in ctx.saved_tensors]
        wanted = [i for i in range(5) if ctx.needs_input_grad[i]]
        for i in wanted:
            inputs[i] = inputs[i].requires_grad_()
        with torch.enable_grad():
            results = prefill_hybrid_reference(*inputs, *ctx.rest)
        found = torch.autograd.grad(results, [inputs[i] for i in wanted], grads)
        answer: list[Tensor | None] = [None] * 10
        for i, grad in zip(wanted, found, strict=True):
            answer[i] = grad
        return tuple(answer)
