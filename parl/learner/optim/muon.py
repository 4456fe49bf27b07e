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
from typing import Any

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
        self.slices: dict[int, Tensor] = {}
        """id of a stack -> factor of each slice's next step [E]; below 0: the slice rests, its
        momentum and weight decay too. Forgotten after a step."""

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
                factor = self.slices.pop(id(parameter), None)
                if factor is not None and not bool((factor == 1).all()):
                    self._step_slices(group, parameter, buffer, factor)
                    continue
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                direction, scale = self._direction(group, parameter, parameter.grad, buffer)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-scale)

    def _direction(
        self, group: dict[str, Any], parameter: Tensor, grad: Tensor, buffer: Tensor
    ) -> tuple[Tensor, float]:
        """O, of ``grad`` and ``buffer`` [..., rows, cols], and lr 0.2 sqrt(max(rows, cols))."""
        update = grad.lerp(buffer, group["momentum"])
        parts = update.chunk(2, dim=-2) if id(parameter) in self._halves else (update,)
        rows, cols = parts[0].shape[-2:]
        direction = torch.cat([orthogonalise(part) for part in parts], dim=-2)
        return direction, group["lr"] * 0.2 * math.sqrt(max(rows, cols))

    def _step_slices(
        self, group: dict[str, Any], parameter: Tensor, buffer: Tensor, factor: Tensor
    ) -> None:
        """The same for the slices that do not rest, each by its factor."""
        assert parameter.grad is not None and parameter.ndim == 3, "slices are of a stack"
        moving = (factor >= 0).nonzero()[:, 0]
        if not len(moving):
            return
        grad, kept = parameter.grad[moving], buffer[moving]
        kept.lerp_(grad, 1 - group["momentum"])
        buffer[moving] = kept
        direction, scale = self._direction(group, parameter, grad, kept)
        value = parameter[moving].mul_(1 - group["lr"] * group["weight_decay"])
        by = (factor[moving] * -scale).to(value.dtype)[:, None, None]
        parameter[moving] = value.addcmul_(direction, by)
