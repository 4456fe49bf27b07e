"""Muon against torch's own, and who is optimised by what."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parl.learner.config import OptimConfig
from parl.learner.optim.build import build_optimizers
from parl.learner.optim.muon import Muon
from tests.parl.learner.tiny import make_model

STEPS = 4


def gradients(shape: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(STEPS)]


def start(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(99))


def run_torch(value: Tensor, grads: list[Tensor]) -> Tensor:
    parameter = nn.Parameter(value.clone())
    optimizer = torch.optim.Muon(
        [parameter], lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach()


def run_ours(value: Tensor, grads: list[Tensor], *, halves: bool = False) -> Tensor:
    parameter = nn.Parameter(value.clone())
    optimizer = Muon([parameter], 0.02, 0.95, 0.1, [parameter] if halves else [])
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("shape", [(16, 16), (24, 8), (8, 24), (1, 5)])
def test_matrix_equals_torch_bit_for_bit(shape: tuple[int, int]):
    """torch.optim.Muon(match_rms_adamw), several steps, weight decay included."""
    grads = gradients(shape)
    assert torch.equal(run_ours(start(shape), grads), run_torch(start(shape), grads))


@pytest.mark.parametrize("shape", [(4, 96, 96), (4, 96, 192)])
def test_experts_of_the_demo_policy_equal_torch_bit_for_bit(shape: tuple[int, int, int]):
    """Each slice of a stack [E, o, i] moves as torch moves that matrix alone."""
    grads = gradients(shape)
    found = run_ours(start(shape), grads)
    for expert in range(shape[0]):
        alone = run_torch(start(shape)[expert], [grad[expert] for grad in grads])
        assert torch.equal(found[expert], alone)


@pytest.mark.parametrize("shape", [(4, 16, 16), (3, 24, 8), (3, 8, 24)])
def test_each_expert_is_a_matrix_of_its_own(shape: tuple[int, int, int]):
    """Whatever the shape, within bf16 rounding of a step: torch's batched product rounds some tiny
    matrices otherwise than its single one (8 of 200 random [4, 16, 16] stacks)."""
    grads = gradients(shape)
    found = run_ours(start(shape), grads)
    for expert in range(shape[0]):
        alone = run_torch(start(shape)[expert], [grad[expert] for grad in grads])
        torch.testing.assert_close(found[expert], alone, rtol=0, atol=2e-4)


def test_fused_gate_and_up_are_two_matrices():
    """Halves of [E, 2I, H] are orthogonalised apart, bit for bit: a huge gate gradient does not
    mute up."""
    shape = (4, 192, 96)
    grads = gradients(shape)
    for grad in grads:
        grad[:, :96] *= 1000
    found = run_ours(start(shape), grads, halves=True)
    for expert in range(4):
        for rows in (slice(0, 96), slice(96, 192)):
            alone = run_torch(start(shape)[expert, rows], [grad[expert, rows] for grad in grads])
            assert torch.equal(found[expert, rows], alone)


def test_matrices_on_muon_and_the_rest_on_adamw():
    """Embedding, head, norms and router are AdamW's; every parameter has exactly one optimizer."""
    model = make_model()
    muon, adamw = build_optimizers(model, OptimConfig())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    by_adamw = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert not by_muon & by_adamw and by_muon | by_adamw == set(names.values())
    suffixes = {name.split(".", 2)[-1] for name in by_muon}
    assert suffixes == {
        *(f"self_attn.{letter}_proj" for letter in "qkvo"),
        "mlp.experts_gate_up_proj",
        "mlp.experts_down_proj",
        "mlp.shared_experts.gate_up_proj",
        "mlp.shared_experts.down_proj",
    }
