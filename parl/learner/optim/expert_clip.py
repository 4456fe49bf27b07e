"""Per-expert clipping by how often an expert is used, and a guard for those that were not.

The seed: "layered adaptive gradient clipping" per expert, with a threshold that grows with the
expert's activation frequency. With f_e = moving share of the routed places and f = 1/E,

    c_e = c_0 clip((f_e / f)^kappa, r_min, r_max),   g_e <- g_e min(1, c_e / |g_e|)

over the expert's gate, up and down together; c_0 = moving median of the norms of experts that got a
token (facts/kimi-facts.md 2.3). Two caveats. Muon does not see the scale of a gradient, so clipping
it changes its weight inside the momentum, not the step: ``update`` scales the step. And an expert
without a token still takes a full step from stale momentum; the guard (``min_tokens``) leaves its
momentum, its step and its weight decay out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.model import PolicyModel
from parl.learner.config import ExpertClipConfig
from parl.learner.optim.muon import Muon

FIELDS = ("frequency", "median", "updates")


class ExpertClip:
    """Shapes: L MoE layers, E experts."""

    def __init__(self, model: PolicyModel, config: ExpertClipConfig) -> None:
        self._config = config
        self._layers = _expert_layers(model)
        experts = model.config.n_routed_experts
        size = len(self._layers)
        self.frequency = torch.full((size, experts), 1.0 / max(experts, 1), dtype=torch.float64)
        """f_e [L, E]."""
        self.median = torch.zeros(size, dtype=torch.float64)
        """c_0 [L]; 0 before the first update."""
        self.updates = 0

    @property
    def is_on(self) -> bool:
        return bool(self._layers) and (self._config.mode != "off" or self._config.min_tokens > 0)

    @torch.no_grad()
    def step(self, muon: Muon, loads: Tensor) -> dict[str, float]:
        """Before ``muon.step``: clip, and tell it which experts rest. loads [L, E]: routed places
        of the whole batch, over all ranks. Returns the share of experts clipped and at rest."""
        loads = loads.double()
        share = loads / loads.sum(dim=1, keepdim=True).clamp(min=1)
        self.frequency.lerp_(share, 1 - self._config.memory)
        clipped = resting = 0
        for layer, parameters in enumerate(self._layers):
            active = loads[layer] >= self._config.min_tokens
            factor = self._factor(layer, parameters, loads[layer])
            for parameter in parameters:
                if self._config.mode == "grad" and parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.dtype)[:, None, None])
                scale = factor if self._config.mode == "update" else torch.ones_like(factor)
                muon.slices[id(parameter)] = torch.where(active, scale, torch.full_like(scale, -1))
            clipped += int((factor < 1).sum())
            resting += int((~active).sum())
        self.updates += 1
        total = loads.numel()
        return {"expert_clip_share": clipped / total, "expert_rest_share": resting / total}

    def _factor(self, layer: int, parameters: list[Tensor], loads: Tensor) -> Tensor:
        """min(1, c_e / |g_e|), float64 [E]; ones when off."""
        norms = torch.stack(
            [
                (torch.zeros_like(p) if p.grad is None else p.grad).double().flatten(1).norm(dim=1)
                for p in parameters
            ]
        ).norm(dim=0)
        if self._config.mode == "off":
            return torch.ones_like(norms)
        used = norms[(loads > 0) & (norms > 0)]
        if len(used):
            memory = self._config.memory if self.median[layer] > 0 else 0.0
            self.median[layer] = memory * self.median[layer] + (1 - memory) * used.median()
        relative = (self.frequency[layer] * len(norms)).pow(self._config.kappa)
        limit = self.median[layer] * relative.clamp(self._config.r_min, self._config.r_max)
        return (limit / norms.clamp(min=1e-30)).clamp(max=1.0)

    def state(self) -> dict[str, Tensor]:
        """Exact; empty when off."""
        if not self.is_on:
            return {}
        return {
            "frequency": self.frequency.clone(),
            "median": self.median.clone(),
            "updates": torch.tensor(self.updates),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Inverse of ``state``; nothing for a checkpoint of before."""
        if state:
            self.frequency.copy_(state["frequency"])
            self.median.copy_(state["median"])
            self.updates = int(state["updates"])


def _expert_layers(model: PolicyModel) -> list[list[Tensor]]:
    """[gate_up [E, 2I, H], down [E, H, I]] of each MoE layer, in order."""
    layers: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        layer, _, last = name.rpartition(".")
        if last.startswith("experts_"):
            layers.setdefault(layer, []).append(parameter)
    return list(layers.values())
