"""Muon for matrices and stacks of matrices (expert tensors), each slice orthogonalised alone.

M = mu M + G; U = G + mu M (Nesterov); O = NS5(U); W -= lr 0.2 sqrt(max(rows, cols)) O + lr wd W.
Source: Moonlight report section 2 and K2 report Algorithm 1; equals
torch.optim.Muon(adjust_lr_fn="match_rms_adamw") bit for bit on matrices. Stacks go through the
batched product (2 to 7 times faster on a CPU than a loop over experts), which torch rounds
otherwise for some tiny shapes; the demo's expert shapes are bit for bit too (test).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5
EPS = 1e-7


def orthogonalise(update: Tensor) -> Tensor:
    """Newton-Schulz iteration on the last two dimensions, in bf16 as the reference does."""
    a, b, c = NS_COEFFICIENTS
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    # the fused forms round as torch.optim.Muon does
    fused = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(NS_STEPS):
        gram = x @ x.mT
        x = fused(x, fused(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Parameters [..., rows, cols]; ``halves`` marks fused gate/up tensors [..., 2I, H] whose two
    halves are matrices of their own."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        halves: Iterable[Tensor] = (),
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._halves = {id(parameter) for parameter in halves}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                buffer = state["momentum"]
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(buffer, group["momentum"])
                parts = update.chunk(2, dim=-2) if id(parameter) in self._halves else (update,)
                rows, cols = parts[0].shape[-2:]
                direction = torch.cat([orthogonalise(part) for part in parts], dim=-2)
                scale = group["lr"] * 0.2 * math.sqrt(max(rows, cols))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-scale)
