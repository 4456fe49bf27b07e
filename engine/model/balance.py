"""Load balance of routed experts: the bias rule, the sequence loss, and what to watch.

Shapes: L MoE layers, E experts, K experts a token, N token rows. Sources: DeepSeek-V3 2.1.2 (bias,
sequence loss), Moonlight (centred bias); facts/kimi-facts.md 3. K2's own rates are not published:
the defaults here are ours.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BIAS_RATE = 1e-3
FINAL_BIAS_RATE = 1e-4
SEQ_AUX_ALPHA = 1e-4


@torch.no_grad()
def move_bias(bias: Tensor, loads: Tensor, rate: float, *, centred: bool = False) -> None:
    """bias [E] += rate * sign(mean load - load), in place; loads [E] tokens an expert.

    ``centred`` subtracts the mean of the signs: the choice is the same, but the bias does not
    drift as a whole.
    """
    loads = loads.double()
    sign = (loads.mean() - loads).sign()
    if centred:
        sign = sign - sign.mean()
    bias.add_(sign.float(), alpha=rate)


def sequence_aux_loss(scores: Tensor, chosen: Tensor, sequence: Tensor) -> Tensor:
    """Mean over sequences of sum_i f_i P_i, >= about 1 and 1 when balanced; times alpha it is a
    loss term.

    scores fp32 [N, E] of the router (gradient flows here), chosen int64 [N, K], sequence int64 [N]
    = number of the sequence of each row. f_i = E / (K T) tokens of the sequence that chose i, P_i =
    mean of its normalised scores.
    """
    num_experts, top_k = scores.shape[1], chosen.shape[1]
    num_sequences = int(sequence.max()) + 1
    lengths = torch.bincount(sequence, minlength=num_sequences).to(scores.dtype)[:, None]
    share = scores / scores.sum(dim=-1, keepdim=True)
    mean_share = scores.new_zeros(num_sequences, num_experts).index_add(0, sequence, share)
    counts = scores.new_zeros(num_sequences, num_experts)
    places = (sequence[:, None] * num_experts + chosen).flatten()
    counts.view(-1).index_add_(0, places, scores.new_ones(len(places)))
    frequency = counts * (num_experts / top_k) / lengths
    return (frequency * mean_share / lengths).sum(dim=-1).mean()


@dataclass(frozen=True, slots=True)
class Alarm:
    """``dead``: an expert got no token in a whole window; ``collapse``: few experts do all."""

    layer: int
    kind: Literal["dead", "collapse"]
    detail: str


class LoadWindow:
    """Tokens an expert got over the last ``window`` tokens or a little more (whole batches).

    The spread of a short window is mostly luck: see ``floor``.
    """

    def __init__(
        self, num_layers: int, num_experts: int, top_k: int, window: int = 524_288
    ) -> None:
        self._top_k, self._window = top_k, window
        self._batches: deque[tuple[int, Tensor]] = deque()
        self.num_tokens = 0
        self.loads = torch.zeros(num_layers, num_experts, dtype=torch.int64)
        """int64 [L, E]"""

    def add(self, loads: Tensor, num_tokens: int) -> None:
        """loads int64 [L, E] of a batch of ``num_tokens``; drops batches that left the window."""
        self._batches.append((num_tokens, loads.clone()))
        self.loads += loads
        self.num_tokens += num_tokens
        while self.num_tokens - self._batches[0][0] >= self._window:
            old_tokens, old = self._batches.popleft()
            self.loads -= old
            self.num_tokens -= old_tokens

    @property
    def is_full(self) -> bool:
        return self.num_tokens >= self._window

    def cv(self) -> Tensor:
        """fp64 [L]: standard deviation of the loads over their mean; 0 = every expert the same."""
        loads = self.loads.double()
        return loads.std(dim=1, correction=0) / loads.mean(dim=1).clamp(min=1e-12)

    def floor(self) -> float:
        """CV that perfectly balanced random choices of this many tokens would show."""
        p = self._top_k / self.loads.shape[1]
        return math.sqrt((1 - p) / (p * max(self.num_tokens, 1)))

    def alarms(self) -> list[Alarm]:
        """Of a full window only. Collapse: the effective number of experts, exp(entropy of the
        loads), is below twice top-k although there are at least four times as many."""
        if not self.is_full:
            return []
        found: list[Alarm] = []
        for layer, loads in enumerate(self.loads):
            dead = (loads == 0).nonzero()[:, 0].tolist()
            if dead:
                found.append(
                    Alarm(
                        layer,
                        "dead",
                        f"{len(dead)} of {len(loads)} experts got none of {self.num_tokens} "
                        f"tokens, first {dead[:4]}",
                    )
                )
            share = loads.double() / loads.sum().clamp(min=1)
            effective = float(torch.special.entr(share).sum().exp())
            if len(loads) >= 4 * self._top_k and effective < 2 * self._top_k:
                found.append(
                    Alarm(
                        layer,
                        "collapse",
                        f"the load is that of {effective:.1f} equal experts of {len(loads)}, "
                        f"top-{self._top_k}",
                    )
                )
        return found
