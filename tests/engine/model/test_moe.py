"""The mixture of experts against a loop over tokens, and what the router's bias may do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.moe import MoE
from engine.model.ops import FastOps, RowOps, TiledOps

SHAPE = ModelConfig(
    hidden_size=20,
    moe_intermediate_size=12,
    n_routed_experts=7,
    num_experts_per_tok=3,
    routed_scaling_factor=1.7,
)


def make_moe(config: ModelConfig = SHAPE, bias: float = 0.3) -> MoE:
    moe = MoE(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in moe.state_dict().items():
            scale = bias if name.endswith("bias") else 0.5
            tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
    return moe


def rows(count: int) -> Tensor:
    return torch.randn(count, SHAPE.hidden_size, generator=torch.Generator().manual_seed(count))


def naive(moe: MoE, config: ModelConfig, x: Tensor, replay: Tensor | None) -> Tensor:
    """facts 1.2 token by token in float64, from the tensors alone."""
    w = {name: tensor.double() for name, tensor in moe.state_dict().items()}

    def ffn(h: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        both = gate_up @ h
        gate, up = both[: len(both) // 2], both[len(both) // 2 :]
        return down @ (gate / (1 + torch.exp(-gate)) * up)

    outputs = []
    for n, h in enumerate(x.double()):
        scores = 1 / (1 + torch.exp(-(w["gate.weight"] @ h)))
        order = sorted(
            range(len(scores)),
            key=lambda e: -float(scores[e] + w["gate.e_score_correction_bias"][e]),
        )
        used = order[: config.num_experts_per_tok] if replay is None else replay[n].tolist()
        weights = scores[used]
        if config.norm_topk_prob:
            weights = weights / (weights.sum() + 1e-20)
        out = torch.zeros_like(h)
        for expert, weight in zip(used, weights * config.routed_scaling_factor, strict=True):
            gate_up, down = w["experts_gate_up_proj"][expert], w["experts_down_proj"][expert]
            out += weight * ffn(h, gate_up, down)
        if config.n_shared_experts:
            shared = "shared_experts.gate_up_proj", "shared_experts.down_proj"
            out += ffn(h, w[shared[0]], w[shared[1]])
        outputs.append(out)
    return torch.stack(outputs)


@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("ops", "count"), [(FastOps(), 1), (FastOps(), 37), (TiledOps(), 64)])
@torch.no_grad()
def test_grouped_experts_are_the_loop_over_tokens(
    ops: RowOps, count: int, normalise: bool, shared: int
):
    """Grouping by expert, padding and scaling change nothing but rounding."""
    config = SHAPE.model_copy(update={"norm_topk_prob": normalise, "n_shared_experts": shared})
    moe = make_moe(config)
    out, _ = moe(rows(count), ops)
    torch.testing.assert_close(
        out.double(), naive(moe, config, rows(count), None), rtol=1e-5, atol=1e-5
    )


@torch.no_grad()
def test_bias_selects_and_never_weighs():
    """A bias that keeps the choice keeps the output bit for bit; a large one forces its expert."""
    plain, biased = make_moe(bias=0.0), make_moe(bias=0.0)
    biased.gate.e_score_correction_bias += 0.25  # the same for all: no other choice
    x = rows(16)
    assert torch.equal(plain(x, FastOps())[0], biased(x, FastOps())[0])
    biased.gate.e_score_correction_bias[4] = 10.0
    chosen, _, weights = biased.gate(x, FastOps())
    assert (chosen == 4).any(dim=1).all()
    torch.testing.assert_close(weights.sum(dim=1), torch.full((16,), 1.7))
    assert (weights <= 1.7).all()


def test_bias_gets_no_gradient():
    """It is a buffer: only the balance rule moves it."""
    moe = make_moe()
    assert "gate.e_score_correction_bias" not in dict(moe.named_parameters())
    moe(rows(5), FastOps())[0].sum().backward()
    assert moe.gate.weight.grad is not None and moe.gate.e_score_correction_bias.grad is None


@torch.no_grad()
def test_replay_uses_recorded_experts_with_own_weights():
    """The recorded experts compute, the router's own choice is still reported."""
    moe = make_moe()
    x = rows(9)
    generator = torch.Generator().manual_seed(3)
    recorded = torch.stack([torch.randperm(7, generator=generator)[:3] for _ in range(9)])
    own, chosen = moe(x, FastOps())
    out, reported = moe(x, FastOps(), recorded)
    assert torch.equal(reported, chosen)
    torch.testing.assert_close(out.double(), naive(moe, SHAPE, x, recorded), rtol=1e-5, atol=1e-5)
    assert torch.equal(moe(x, FastOps(), chosen)[0], own)


def test_gradients_of_grouped_experts():
    """The same as those of the loop, for every tensor; unused experts get zeros."""
    moe = make_moe()
    x = rows(4).requires_grad_()
    moe(x, FastOps())[0].square().sum().backward()
    assert x.grad is not None
    eps = 1e-3
    for index in [(0, 0), (3, 7)]:
        step = torch.zeros_like(x)
        step[index] = eps
        with torch.no_grad():
            _, used = moe(x, FastOps())
            ends = [naive(moe, SHAPE, x + s * step, used).square().sum() for s in (1, -1)]
        assert float(x.grad[index]) == pytest.approx(float(ends[0] - ends[1]) / (2 * eps), rel=2e-2)
    grad = moe.experts_down_proj.grad
    assert grad is not None
    unused = sorted(set(range(7)) - set(used.flatten().tolist()))
    assert not grad[unused].any()


@pytest.mark.parametrize(("ops", "count"), [(FastOps(), 37), (TiledOps(), 64)])
def test_all_tokens_to_one_expert(ops: RowOps, count: int):
    """Exact, and with exact zero gradients for the six experts that get nothing."""
    config = SHAPE.model_copy(update={"num_experts_per_tok": 1})
    moe = make_moe(config)
    with torch.no_grad():
        moe.gate.e_score_correction_bias[4] = 10.0
    out, chosen = moe(rows(count), ops)
    assert (chosen == 4).all()
    torch.testing.assert_close(
        out.detach().double(), naive(moe, config, rows(count), None).detach(), rtol=1e-5, atol=1e-5
    )
    out.square().sum().backward()
    for stack in (moe.experts_gate_up_proj, moe.experts_down_proj):
        assert stack.grad is not None and stack.grad[4].abs().sum() > 0
        assert not stack.grad[[0, 1, 2, 3, 5, 6]].any()


@torch.no_grad()
def test_no_rows():
    """An empty batch is an empty batch."""
    out, chosen = make_moe()(rows(0), FastOps())
    assert out.shape == (0, 20) and chosen.shape == (0, 3)


@torch.no_grad()
def test_384_experts_of_which_8():
    """The released counts, with tiny widths."""
    config = ModelConfig(
        hidden_size=8, moe_intermediate_size=4, n_routed_experts=384, num_experts_per_tok=8
    )
    out, chosen = make_moe(config)(rows(33)[:, :8], FastOps())
    assert out.isfinite().all() and chosen.shape == (33, 8)
    assert (chosen.diff(dim=1) > 0).all(), "experts of a row are distinct and sorted"
