"""Expert clipping by frequency, and experts without tokens that rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from parl.learner.config import ExpertClipConfig, OptimConfig
from parl.learner.optim.build import build_optimizers
from parl.learner.optim.expert_clip import ExpertClip
from parl.learner.optim.muon import Muon
from tests.parl.learner.tiny import MODEL, make_advantages, make_learner, make_model, make_samples

L, E = MODEL.num_moe_layers, MODEL.n_routed_experts
EVEN = torch.full((L, E), 10.0)


def experts_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if ".experts_" in name}


def prepared(
    config: ExpertClipConfig, norms: list[float]
) -> tuple[ExpertClip, Muon, dict[str, Tensor]]:
    """Gradients whose norm over gate, up and down is ``norms[e]`` for expert e."""
    model = make_model()
    muon, _ = build_optimizers(model, OptimConfig())
    parameters = experts_of(model)
    for parameter in parameters.values():
        grad = torch.ones_like(parameter)
        for expert, norm in enumerate(norms):
            # two tensors a layer, each with half of the squared norm
            grad[expert] *= norm / 2**0.5 / grad[expert].norm()
        parameter.grad = grad
    return ExpertClip(model, config), muon, parameters


def norm_of(parameters: dict[str, Tensor], layer: int, expert: int) -> float:
    found = [
        p.grad[expert]
        for n, p in parameters.items()
        if f"layers.{layer}." in n and p.grad is not None
    ]
    assert len(found) == 2
    return float(torch.cat([grad.flatten() for grad in found]).norm())


def test_by_hand_at_equal_frequencies() -> None:
    """c_e = c_0 = the median norm: only the expert above it is brought down to it."""
    norms = [1.0] * (E - 1) + [8.0]
    clip, muon, parameters = prepared(ExpertClipConfig(mode="grad"), norms)
    metrics = clip.step(muon, EVEN)
    layer = L - 1 + MODEL.first_k_dense_replace
    assert norm_of(parameters, layer, E - 1) == pytest.approx(1.0, rel=1e-5)
    assert norm_of(parameters, layer, 0) == pytest.approx(1.0, rel=1e-5)
    assert metrics == {"expert_clip_share": pytest.approx(1 / E), "expert_rest_share": 0.0}


def test_the_threshold_grows_with_frequency() -> None:
    """(f_e / f)^0.5 between r_min and r_max; f_e is a moving share."""
    norms = [4.0] * E
    clip, muon, parameters = prepared(ExpertClipConfig(mode="grad", memory=0.0), norms)
    loads = EVEN.clone()
    loads[:, 0], loads[:, 1] = 40.0, 0.1
    clip.step(muon, loads)
    layer = L - 1 + MODEL.first_k_dense_replace
    share = float(loads[0, 2] / loads[0].sum()) * E
    assert norm_of(parameters, layer, 0) == pytest.approx(4.0, rel=1e-5)
    assert norm_of(parameters, layer, 1) == pytest.approx(4.0 * 0.25, rel=1e-5)
    assert norm_of(parameters, layer, 2) == pytest.approx(4.0 * min(1.0, share**0.5), rel=1e-5)


def test_update_mode_scales_the_step_and_grad_mode_does_not() -> None:
    """Muon's first step from one gradient has the same size at any scale of it: clipping the
    gradient changes nothing, clipping the update does."""
    steps = {}
    norms = [1.0] * (E - 1) + [8.0]
    for mode in ("off", "grad", "update"):
        config = ExpertClipConfig.model_validate({"mode": mode})
        clip, muon, parameters = prepared(config, norms)
        before = {name: p.detach().clone() for name, p in parameters.items()}
        clip.step(muon, EVEN)
        muon.step()
        name = next(iter(parameters))
        steps[mode] = (parameters[name].detach() - before[name])[E - 1].norm()
    assert steps["grad"] == pytest.approx(float(steps["off"]), rel=0.02)
    assert steps["update"] == pytest.approx(float(steps["off"]) / 8, rel=0.02)


def test_a_cold_expert_rests() -> None:
    """No token, no step, no decay, momentum as it was; without the guard stale momentum moves it
    at full size. The others move as without the guard, to the bit."""
    moved = {}
    for guard in (0, 1):
        model = make_model()
        muon, _ = build_optimizers(model, OptimConfig(weight_decay=0.1))
        clip = ExpertClip(model, ExpertClipConfig(min_tokens=guard))
        parameters = experts_of(model)
        generator = torch.Generator().manual_seed(1)
        for loads in (EVEN, torch.cat([torch.zeros(L, 1), EVEN[:, 1:]], dim=1)):
            for parameter in parameters.values():
                grad = torch.randn(parameter.shape, generator=generator)
                parameter.grad = grad * (loads[0] > 0)[:, None, None]
            before = {name: p.detach().clone() for name, p in parameters.items()}
            momentum = {
                n: muon.state[p]["momentum"].clone() for n, p in parameters.items() if muon.state[p]
            }
            if clip.is_on:
                clip.step(muon, loads)
            muon.step()
        name = next(iter(parameters))
        moved[guard] = parameters[name].detach().clone()
        step = (moved[guard] - before[name])[0]
        if guard:
            assert (step == 0).all()
            assert torch.equal(muon.state[parameters[name]]["momentum"][0], momentum[name][0])
        else:
            assert step.norm() > 0
    assert torch.allclose(moved[0][1:], moved[1][1:], atol=1e-7)


def test_clipping_state_survives_a_checkpoint(tmp_path: Path) -> None:
    """Two updates in one go, or with a save and a restore between them: the same bits."""
    optim = {"profile": "seed", "experts": {"mode": "update", "min_tokens": 1}}
    whole, first, second = (make_learner(optim=optim) for _ in range(3))
    samples = make_samples(whole.model)
    advantages = make_advantages(len(samples))
    metrics = [whole.update(samples, advantages) for _ in range(3)]
    assert metrics[0]["expert_rest_share"] >= 0 and metrics[2]["expert_clip_share"] > 0
    first.update(samples, advantages)
    first.update(samples, advantages)
    first.save(tmp_path)
    second.restore(tmp_path)
    again = second.update(samples, advantages)
    for name, value in metrics[2].items():
        if name != "peak_memory_mib":
            assert again[name] == value, name
    for name, tensor in whole.weights().items():
        assert (second.weights()[name] == tensor).all(), name


def test_profiles() -> None:
    """kimi leaves experts alone; seed clips and rests; what is said wins."""
    assert OptimConfig().expert_clip == ExpertClipConfig()
    seed = OptimConfig(profile="seed").expert_clip
    assert (seed.mode, seed.min_tokens) == ("grad", 1)
    assert OptimConfig(profile="seed", experts=ExpertClipConfig()).expert_clip.mode == "off"
