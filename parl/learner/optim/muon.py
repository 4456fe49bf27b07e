"""Muon for matrices and stacks of matrices (expert tensors), each slice orthogonalised alone.

M = mu M + G; U = G + mu M (Nesterov); O = NS5(U); W -= lr 0.2 sqrt(max(rows, cols)) O + lr wd W.
Source: Moonlight report section 2 and K2 report Algorithm 1; equals
torch.optim.Muon(adjust_lr_fn="match_rms_adamw") bit for bit on matrices. Stacks go through the
batched product (2 to 7 times faster on a CPU than a loop over experts), which torch rounds
otherwise for some tiny shapes; the demo's expert shapes are bit for bit too (test).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parl.learner.optim.peers import Peers, owners, work_of

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5
EPS = 1e-7


def orthogonalise(update: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Newton-Schulz iteration on the last two dimensions, in bf16 as the reference does unless
    ``dtype`` says otherwise."""
    a, b, c = NS_COEFFICIENTS
    x = update.to(dtype)
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


@dataclass(frozen=True, slots=True)
class _Move:
    """What one parameter's step needs besides O."""

    group: dict[str, Any]
    parameter: Tensor
    parts: Sequence[Tensor]
    """U: matrices or stacks [..., rows, cols] that are orthogonalised apart."""
    moving: Tensor | None = None
    """Slices of a stack that do not rest, int64 [M]; None = all of it."""
    factor: Tensor | None = None
    """Of each of them [M]."""


class Muon(torch.optim.Optimizer):
    """Parameters [..., rows, cols]; ``halves`` marks fused gate/up tensors [..., 2I, H] whose two
    halves are matrices of their own. With ``peers`` gradients must be equal on all ranks, every
    rank must call ``step``, and each orthogonalises its share: bit for bit the step of one."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        halves: Iterable[Tensor] = (),
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        peers: Peers | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._halves = {id(parameter) for parameter in halves}
        self._ns_dtype = ns_dtype
        self._peers = peers
        self.slices: dict[int, Tensor] = {}
        """id of a stack -> factor of each slice's next step [E]; below 0: the slice rests, its
        momentum and weight decay too. Forgotten after a step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self._peers is None or self._peers.count == 1:
            # one at a time: no second copy of all matrices
            for move in self._moves():
                _apply(move, [orthogonalise(part, self._ns_dtype) for part in move.parts])
            return
        moves = list(self._moves())
        directions = iter(self._shared([part for move in moves for part in move.parts]))
        for move in moves:
            _apply(move, [next(directions) for _ in move.parts])

    def _moves(self) -> Iterator[_Move]:
        """Momentum goes on; nothing of a parameter that has no gradient or rests as a whole."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                buffer = state["momentum"]
                factor = self.slices.pop(id(parameter), None)
                if factor is None or bool((factor == 1).all()):
                    buffer.lerp_(parameter.grad, 1 - group["momentum"])
                    yield _Move(
                        group, parameter, self._parts(group, parameter, parameter.grad, buffer)
                    )
                    continue
                assert parameter.ndim == 3, "slices are of a stack"
                moving = (factor >= 0).nonzero()[:, 0]
                if len(moving):
                    grad, kept = parameter.grad[moving], buffer[moving]
                    kept.lerp_(grad, 1 - group["momentum"])
                    buffer[moving] = kept
                    parts = self._parts(group, parameter, grad, kept)
                    yield _Move(group, parameter, parts, moving, factor[moving])

    def _parts(
        self, group: dict[str, Any], parameter: Tensor, grad: Tensor, buffer: Tensor
    ) -> Sequence[Tensor]:
        update = grad.lerp(buffer, group["momentum"])
        return update.chunk(2, dim=-2) if id(parameter) in self._halves else (update,)

    def _shared(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """O of all ``parts``, of which this rank computes its own; one collective call."""
        assert self._peers is not None, "asked for"
        if not parts:
            return []
        count, rank = self._peers.count, self._peers.rank
        owner = owners([work_of(part.shape) for part in parts], count)
        sizes = [0] * count
        places = []
        for part, who in zip(parts, owner, strict=True):
            places.append(slice(sizes[who], sizes[who] + part.numel()))
            sizes[who] += part.numel()
        mine = parts[0].new_zeros(max(sizes))
        for part, who, place in zip(parts, owner, places, strict=True):
            if who == rank:
                mine[place] = orthogonalise(part, self._ns_dtype).flatten()
        gathered = self._peers.all_gather(mine)
        return [
            gathered[who][place].view(part.shape)
            for part, who, place in zip(parts, owner, places, strict=True)
        ]


def _apply(move: _Move, directions: Sequence[Tensor]) -> None:
    """W <- (1 - lr wd) W - lr 0.2 sqrt(max(rows, cols)) O, each slice by its factor."""
    group, parameter = move.group, move.parameter
    rows, cols = move.parts[0].shape[-2:]
    scale = group["lr"] * 0.2 * math.sqrt(max(rows, cols))
    decay = 1 - group["lr"] * group["weight_decay"]
    direction = torch.cat(list(directions), dim=-2)
    if move.moving is None or move.factor is None:
        parameter.mul_(decay)
        parameter.add_(direction, alpha=-scale)
        return
    value = parameter[move.moving].mul_(decay)
    by = (move.factor * -scale).to(value.dtype)[:, None, None]
    parameter[move.moving] = value.addcmul_(direction, by)
