"""A dense Llama-family model turned into a mixture of experts that computes the same at first.

Every expert is a copy of the dense FFN. The weights of a token's experts sum to one, so without
noise the routed sum is the dense output whatever the router chooses (sparse upcycling, Komatsuzaki
et al. 2023, with a sigmoid router); training then drives the copies apart.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import torch

from engine.errors import CheckpointError
from engine.model.account import account
from engine.model.checkpoint.sizes import BOUNDS
from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.model.moe import DenseFFN, MoE


def upcycled_config(
    dense: ModelConfig, num_experts: int, top_k: int, shared: float, num_dense_layers: int
) -> ModelConfig:
    """CheckpointError when the model has experts already or the numbers do not fit."""
    if dense.num_moe_layers:
        raise CheckpointError(
            f"the model has {dense.num_moe_layers} expert layers already; expected a dense model"
        )
    if not 0 <= shared < 1:
        raise CheckpointError(f"shared={shared}, expected a share in [0, 1)")
    if not 1 <= top_k <= num_experts:
        raise CheckpointError(f"top_k={top_k} of {num_experts} experts, expected 1 to all of them")
    if num_experts > BOUNDS["n_routed_experts"]:
        raise CheckpointError(
            f"{num_experts} experts in a layer, expected at most {BOUNDS['n_routed_experts']}"
        )
    if not 0 <= num_dense_layers < dense.num_hidden_layers:
        raise CheckpointError(
            f"num_dense_layers={num_dense_layers} of {dense.num_hidden_layers}: no layer would "
            "get experts"
        )
    return ModelConfig.model_validate(
        dense.model_dump()
        | {
            "first_k_dense_replace": num_dense_layers,
            "moe_intermediate_size": dense.intermediate_size,
            "n_routed_experts": num_experts,
            "num_experts_per_tok": top_k,
            "n_shared_experts": 1 if shared else 0,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0 - shared,
        }
    )


@torch.no_grad()
def upcycle(
    dense: PolicyModel,
    num_experts: int,
    top_k: int,
    *,
    shared: float = 0.0,
    num_dense_layers: int = 0,
    noise: float = 0.0,
    seed: int = 0,
) -> PolicyModel:
    """``shared`` of the output comes from a shared expert (also a copy), the rest from the routed
    ones. ``noise`` adds normal noise of that share of each matrix's own spread to every routed
    expert. ``num_dense_layers`` layers at the start stay dense, as in K2.
    """
    if not 0 <= noise < math.inf:
        raise CheckpointError(f"noise={noise}, expected a number >= 0, in spreads of the matrices")
    config = upcycled_config(dense.config, num_experts, top_k, shared, num_dense_layers)
    _check_memory(config, dense.embed_tokens.dtype)
    model = PolicyModel(config, seed=None).to(dense.embed_tokens.dtype)
    generator = torch.Generator().manual_seed(seed)
    source, target = dense.state_dict(), model.state_dict()
    for name in target.keys() & source.keys():
        target[name].copy_(source[name])
    for old, new in zip(dense.layers, model.layers, strict=True):
        ffn, moe = old.mlp, new.mlp
        if not isinstance(moe, MoE):
            continue
        assert isinstance(ffn, DenseFFN), "checked by upcycled_config"
        moe.gate.weight.normal_(0.0, config.initializer_range, generator=generator)
        moe.gate.e_score_correction_bias = torch.zeros(num_experts)
        pairs = (
            (moe.experts_gate_up_proj, ffn.gate_up_proj),
            (moe.experts_down_proj, ffn.down_proj),
        )
        for stack, matrix in pairs:
            stack.copy_(matrix[None].expand_as(stack))
            if noise:
                for expert in stack:
                    drawn = torch.randn(expert.shape, generator=generator).to(expert)
                    expert.add_(drawn * float(matrix.float().std()), alpha=noise)
        if moe.shared_experts is not None:
            moe.shared_experts.gate_up_proj.copy_(ffn.gate_up_proj)
            moe.shared_experts.down_proj.copy_(ffn.down_proj * shared)
    return model


def _check_memory(config: ModelConfig, dtype: torch.dtype) -> None:
    """CheckpointError instead of a process that the system kills half-way."""
    # built in float32, then kept in ``dtype``
    size = torch.float32.itemsize + (dtype.itemsize if dtype is not torch.float32 else 0)
    parameters, free = account(config).total, _available_bytes()
    if parameters * size > free:
        raise CheckpointError(
            f"{config.n_routed_experts} experts in {config.num_moe_layers} layers make "
            f"{parameters / 1e9:.3g} B parameters, {parameters * size / 1024**3:.1f} GiB; "
            f"{free / 1024**3:.1f} GiB of memory are available: take fewer experts or more dense "
            "layers"
        )


def _available_bytes() -> int:
    """What can be had without swapping; all of the memory where the system does not say."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
