"""How long should the hot zone be? A controller fed with what attention did in each step.

absolute: thresholds 0.3 and 0.7 on the moving mean of normalised entropy, as first specified. On a
real model that mean stays between 0.34 and 0.39 (facts/kv-attention.md 1.2), so it never acts; kept
for comparison. quantile: thresholds are quantiles of the model's own first steps. Low entropy does
not mean local, the focus may lie far away, so a step asks for more only when attention really falls
just beyond the hot edge.

A tier that depends on what was attended to cannot be replayed by the learner: contexts that are
deterministic have no controller (facts 3).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import NotSupportedError
from engine.kvcache.config import BLOCK
from engine.kvcache.config import HotZoneConfig as HotZoneConfig


@dataclass(frozen=True, slots=True)
class HotSignal:
    """What one step's attention says, means over heads."""

    entropy: float
    """0 .. 1: entropy without the sink, over the log of the number of positions."""
    beyond: float
    """Share of the mass without the sink that falls in the ``step`` tokens beyond the hot edge."""


def hot_signal(
    weights: Tensor,
    t: int,
    hot: int,
    positions: Tensor | None = None,
    step: int = 512,
    sink: int = BLOCK,
) -> HotSignal:
    """Signal of softmax weights [H, n] of the query at position t - 1.

    positions: int64 [n] or [H, n], what was read (-1 for padding); None when all t were. One layer
    of the middle and one head of each group are enough; everything would cost what attention
    costs. Heads on the sink alone say nothing and are left out; with no other entropy is 0.
    """
    edge = max(sink, t - hot)
    first = max(sink, edge - step)
    if positions is None:
        assert weights.shape[1] == t, f"{weights.shape[1]} weights of {t} positions"
        far, near = weights[:, sink:], weights[:, first:edge]
        size = torch.tensor(float(far.shape[1]))
    else:
        far = weights * (positions >= sink)
        near = weights * ((positions >= first) & (positions < edge))
        size = (positions >= sink).sum(dim=-1).float()
    mass = far.sum(dim=1)
    # sum of p log p over the rest, scaled to a distribution without a pass to divide
    entropy = torch.special.entr(far).sum(dim=1) / mass + mass.log()
    numbers = torch.stack([entropy / size.log(), near.sum(dim=1) / mass])
    kept = numbers[:, (mass > 1e-6) & (size > 1)]
    if kept.shape[1] == 0:
        return HotSignal(0.0, 0.0)
    mean_entropy, beyond = kept.mean(dim=1).tolist()
    return HotSignal(min(1.0, max(0.0, mean_entropy)), beyond)


class HotZoneController:
    """One per context. ``hot`` is where the zone starts and its least length.

    NotSupportedError for a deterministic context.
    """

    def __init__(self, config: HotZoneConfig, hot: int, deterministic: bool) -> None:
        if deterministic:
            raise NotSupportedError(
                "an adaptive hot zone depends on what was attended to, which the learner cannot "
                "replay; leave it off for deterministic contexts"
            )
        if hot < BLOCK or hot % BLOCK or hot > config.maximum:
            raise ValueError(
                f"hot zone of {hot} tokens; expected a multiple of {BLOCK} up to {config.maximum}"
            )
        self.config = config
        self.hot = hot
        self.start = hot
        self._recent: deque[float] = deque(maxlen=config.mean_over)
        self._watched: list[HotSignal] = []
        self._thresholds: tuple[float, float, float] | None = None
        self._wish, self._in_a_row = 0, 0

    @property
    def thresholds(self) -> tuple[float, float, float] | None:
        """quantile: entropy low, entropy high, mass beyond high; None while calibrating."""
        return self._thresholds

    def observe(self, signal: HotSignal) -> int:
        """Length of the hot zone for the next step. The caller moves blocks, at a step boundary."""
        self._recent.append(signal.entropy)
        if self.config.mode == "absolute":
            wish = self._absolute()
        elif self._thresholds is None:
            self._watch(signal)
            return self.hot
        else:
            wish = self._quantile(signal, self._thresholds)
        self._in_a_row = self._in_a_row + 1 if wish and wish == self._wish else int(wish != 0)
        self._wish = wish
        if self._in_a_row >= self.config.patience:
            self._in_a_row = 0
            if wish > 0:
                self.hot = min(self.hot + self.config.step, self.config.maximum)
            elif self.config.mode == "absolute":
                self.hot = self.start
            else:
                self.hot = max(self.hot - self.config.step, self.start)
        return self.hot

    def _absolute(self) -> int:
        if len(self._recent) < self.config.mean_over:
            return 0
        mean = sum(self._recent) / len(self._recent)
        return int(mean < self.config.low) - int(mean > self.config.high)

    def _quantile(self, signal: HotSignal, thresholds: tuple[float, float, float]) -> int:
        """Grow: attention falls beyond the edge, and more than it used to or from a sharp focus.
        Shrink: attention is spread and none of it is near the edge."""
        low, high, beyond_high = thresholds
        near = signal.beyond >= self.config.edge_share
        if near and (signal.beyond >= beyond_high or signal.entropy <= low):
            return 1
        return -int(signal.entropy >= high and not near)

    def _watch(self, signal: HotSignal) -> None:
        self._watched.append(signal)
        if len(self._watched) < self.config.calibration:
            return
        entropies = torch.tensor([signal.entropy for signal in self._watched])
        beyonds = torch.tensor([signal.beyond for signal in self._watched])
        wanted = torch.tensor([self.config.low_quantile, self.config.high_quantile])
        low, high = entropies.quantile(wanted).tolist()
        self._thresholds = low, high, float(beyonds.quantile(wanted[1]))
        self._watched.clear()
