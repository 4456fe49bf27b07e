"""Policy losses against values worked out by hand (kimi facts 4.1)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from parl.learner.config import LossConfig
from parl.learner.losses import LOSSES

WINDOW = LossConfig(ratio_low=math.exp(-0.5), ratio_high=math.exp(0.5), tau=0.1)
RATIOS = torch.tensor([-1.0, -0.3, 0.0, 0.3, 1.0], dtype=torch.float64)


def gradient(kind: str, log_ratio: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    old = torch.full_like(log_ratio, -2.0)
    new = (old + log_ratio).requires_grad_()
    loss, _ = LOSSES[kind](new, old, advantages, float(len(new)), config)
    loss.backward()
    assert new.grad is not None
    return new.grad


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [(1.0, (-0.04, -0.16, -0.2, -0.258, 0.04)), (-1.0, (-0.04, 0.136, 0.2, 0.282, 0.04))],
)
def test_k25_gradient_table(advantage: float, expected: tuple[float, ...]):
    """Window +-0.5, tau = 0.1: outside only the pull 2 tau log r / n, whatever the sign of A."""
    found = gradient("k25_token_mask", RATIOS, torch.full_like(RATIOS, advantage), WINDOW)
    assert found.tolist() == pytest.approx(expected, abs=5e-4)


def test_k25_counts_what_it_masked():
    """Two of the five lie outside the window."""
    zero = torch.zeros_like(RATIOS)
    _, masked = LOSSES["k25_token_mask"](RATIOS, zero, zero, 5.0, WINDOW)
    assert int(masked) == 2


def test_k25_survives_ratios_beyond_float():
    """exp(200) would be inf; a masked token contributes a finite pull and no nan."""
    far = torch.tensor([200.0, -200.0])
    found = gradient("k25_token_mask", far, torch.ones(2), WINDOW)
    assert found.tolist() == pytest.approx([20.0, -20.0])


def test_k25_on_policy_is_plain_policy_gradient():
    """At ratio 1 the gradient is -A / n."""
    advantages = torch.tensor([0.5, -2.0, 0.0])
    found = gradient("k25_token_mask", torch.zeros(3), advantages, LossConfig())
    assert found.tolist() == pytest.approx((-advantages / 3).tolist())


@pytest.mark.parametrize(
    ("advantage", "clipped"), [(1.0, (False, False, True)), (-1.0, (True, False, False))]
)
def test_ppo_clips_only_the_side_it_profits_from(advantage: float, clipped: tuple[bool, ...]):
    """Unlike the token mask: a good token keeps its gradient when its ratio is too low."""
    log_ratio = torch.tensor([-1.0, 0.0, 1.0])
    config = LossConfig(ratio_low=0.8, ratio_high=1.28)
    found = gradient("ppo_clip", log_ratio, torch.full((3,), advantage), config)
    plain = -log_ratio.exp() * advantage / 3
    for value, full, is_clipped in zip(found, plain, clipped, strict=True):
        assert float(value) == pytest.approx(0.0 if is_clipped else float(full))


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_micro_batches_add_up(kind: str):
    """The norm is the whole batch's, so parts sum to the loss of the whole."""
    generator = torch.Generator().manual_seed(0)
    new, old, gain = (torch.randn(10, generator=generator, dtype=torch.float64) for _ in range(3))
    config = LossConfig(tau=0.3)
    whole, _ = LOSSES[kind](new, old, gain, 10.0, config)
    parts = [
        LOSSES[kind](new[s], old[s], gain[s], 10.0, config)[0]
        for s in (slice(0, 3), slice(3, 3), slice(3, 10))
    ]
    assert float(sum(parts)) == pytest.approx(float(whole))
