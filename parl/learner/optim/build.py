"""Which tensor goes to which optimizer."""

from __future__ import annotations

import torch

from engine.model.model import PolicyModel
from parl.learner.config import OptimConfig
from parl.learner.optim.muon import Muon
from parl.learner.optim.peers import Peers


def build_optimizers(
    model: PolicyModel, config: OptimConfig, peers: Peers | None = None
) -> tuple[Muon, torch.optim.AdamW]:
    """Hidden matrices and expert stacks on Muon, whose work ``peers`` share; embedding, head, norms
    and router on AdamW."""
    matrices, halves, rest = [], [], []
    for name, parameter in model.named_parameters():
        if name.startswith("layers.") and parameter.ndim >= 2 and not name.endswith("gate.weight"):
            matrices.append(parameter)
            if name.endswith("gate_up_proj"):
                halves.append(parameter)
        else:
            rest.append(parameter)
    return (
        Muon(
            matrices,
            config.muon_lr,
            config.momentum,
            config.weight_decay,
            halves,
            ns_dtype=getattr(torch, config.ns_dtype),
            peers=peers,
        ),
        torch.optim.AdamW(
            rest,
            lr=config.adamw_lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        ),
    )
