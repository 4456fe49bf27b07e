"""Choosing experts and multiplying by them."""

import pytest
import torch
from torch import Tensor

from engine.kernels.moe_grouped_gemm import moe_grouped_gemm
from engine.kernels.moe_route import moe_route
from engine.model.config import ModelConfig
from engine.model.moe import Router
from tests.engine.kernels.interpreter import Kernels
from tests.engine.kernels.parity import assert_as_good, numbers

ROUTE = "engine.kernels.moe_route:moe_route"
GEMM = "engine.kernels.moe_grouped_gemm:moe_grouped_gemm"


def exact_route(logits: Tensor, bias: Tensor, used: Tensor, scale: float) -> Tensor:
    weights = logits.double().sigmoid().gather(1, used)
    return weights / (weights.sum(1, keepdim=True) + 1e-20) * scale


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "top_groups"),
    [
        (12, 3, 1, 1),
        pytest.param(48, 4, 4, 2, marks=pytest.mark.slow),
        pytest.param(21, 5, 3, 2, marks=pytest.mark.slow),
        pytest.param(384, 8, 1, 1, marks=pytest.mark.slow),
        pytest.param(6, 6, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_experts_are_chosen(
    kernels: Kernels, experts: int, top_k: int, groups: int, top_groups: int
):
    """The bias chooses and does not weigh; equal scores go to the lower id."""
    logits = numbers(7, experts, scale=2.0)
    bias = numbers(experts, seed=1, scale=0.2)
    logits[1] = 0
    logits[2] = -80
    logits[3] = 80
    named = {"groups": groups, "top_groups": top_groups, "scale": 2.5}
    used, weights = kernels.run(ROUTE, logits, bias, top_k, **named)
    by_torch = moe_route(logits, bias, top_k, **named)
    assert torch.equal(used, by_torch[0])
    exact = exact_route(logits, bias, used, 2.5)
    assert_as_good(weights, by_torch[1], exact)


@pytest.mark.slow
def test_ties_and_no_rows(kernels: Kernels):
    used, weights = kernels.run(ROUTE, torch.zeros(1, 12), torch.zeros(12), 3, groups=4)
    assert used.tolist() == [[0, 1, 2]] and weights.sum() == pytest.approx(1)
    used, _ = kernels.run(ROUTE, torch.zeros(0, 12), torch.zeros(12), 3)
    assert used.shape == (0, 3)


@pytest.mark.parametrize("groups", [1, 4])
def test_the_twin_is_the_models_router(groups: int):
    config = ModelConfig(
        hidden_size=16,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=groups,
        topk_group=2 if groups > 1 else 1,
        routed_scaling_factor=2.0,
    )
    router = Router(config)
    router.e_score_correction_bias.copy_(numbers(16, scale=0.3))
    logits = numbers(50, 16, seed=1)
    chosen, _, weights = router.route(torch.sigmoid(logits))
    ours = moe_route(
        logits,
        router.e_score_correction_bias,
        4,
        groups=groups,
        top_groups=config.topk_group,
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
    assert torch.equal(ours[0], chosen)
    assert torch.allclose(ours[1], weights, rtol=1e-6)


def exact_experts(
    x: Tensor, used: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    x, weights, gate_up, down = (t.double() for t in (x, weights, gate_up, down))
    gate, up = torch.einsum("nh,nkih->nki", x, gate_up[used]).chunk(2, dim=2)
    parts = torch.einsum("nki,nkhi->nkh", torch.nn.functional.silu(gate) * up, down[used])
    return (parts * weights[..., None]).sum(1)


@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "hidden", "width"),
    [
        (3, 4, 2, 20, 12),
        pytest.param(50, 3, 2, 36, 20, marks=pytest.mark.slow),
        pytest.param(1, 8, 8, 64, 64, marks=pytest.mark.slow),
        pytest.param(0, 4, 2, 20, 12, marks=pytest.mark.slow),
    ],
)
def test_experts_multiply(
    kernels: Kernels, rows: int, experts: int, top_k: int, hidden: int, width: int
):
    """Experts without rows, groups that are no whole tiles, gates so large that exp overflows."""
    scores = torch.rand(rows, experts, generator=torch.Generator().manual_seed(2))
    scores[:, experts - 1] -= 0.6
    used = scores.topk(top_k).indices.sort(dim=1).values
    gate_up = numbers(experts, 2 * width, hidden, seed=3, scale=0.3)
    if rows > 10:  # of a few rows the largest error is luck
        gate_up[0, 0] *= 400
    arguments = (
        numbers(rows, hidden),
        used,
        torch.rand(rows, top_k),
        gate_up,
        numbers(experts, hidden, width, seed=4, scale=0.3),
    )
    ours = kernels.run(GEMM, *arguments)
    assert_as_good(ours, moe_grouped_gemm(*arguments), exact_experts(*arguments))
    if rows:
        assert [kernels.launches[f"moe_{part}"] for part in ("up", "down", "combine")] == [1, 1, 1]
