"""Policy losses against values worked out by hand (kimi facts 4.1)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from parl.learner.config import LossConfig
from parl.learner.losses import LOSSES, LossTokens

WINDOW = LossConfig(ratio_low=math.exp(-0.5), ratio_high=math.exp(0.5), tau=0.1)
RATIOS = torch.tensor([-1.0, -0.3, 0.0, 0.3, 1.0], dtype=torch.float64)


def tokens_of(
    new: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor | None = None, of: int = 0
) -> LossTokens:
    """All one sequence unless told; ``of``: tokens of the whole batch."""
    sequence = torch.zeros(len(new), dtype=torch.long) if sequence is None else sequence
    count = float(len(sequence.unique()))
    return LossTokens(new, old, advantages, sequence, float(of or len(new)), count)


def gradient(
    kind: str,
    log_ratio: Tensor,
    advantages: Tensor,
    config: LossConfig,
    sequence: Tensor | None = None,
) -> Tensor:
    old = torch.full_like(log_ratio, -2.0)
    new = (old + log_ratio).requires_grad_()
    loss, _ = LOSSES[kind](tokens_of(new, old, advantages, sequence), config)
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
    _, masked = LOSSES["k25_token_mask"](tokens_of(RATIOS, zero, zero), WINDOW)
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


LENGTHS = (3, 1, 4, 2)
SEQUENCE = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))


def draw(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """New and old logprobs of ten tokens and an advantage for each of their four sequences."""
    generator = torch.Generator().manual_seed(seed)
    new, old = (torch.randn(10, generator=generator, dtype=torch.float64) for _ in range(2))
    return new, old, torch.randn(4, generator=generator, dtype=torch.float64)[SEQUENCE]


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_micro_batches_add_up(kind: str):
    """The norms are the whole batch's, so micro-batches of whole sequences sum to its loss; an
    empty one adds nothing."""
    new, old, gain = draw()
    config = LossConfig(kind="k2_sequence", tau=0.3)
    whole, _ = LOSSES[kind](LossTokens(new, old, gain, SEQUENCE, 10.0, 4.0), config)
    parts = [
        LOSSES[kind](LossTokens(new[s], old[s], gain[s], SEQUENCE[s], 10.0, 4.0), config)[0]
        for s in (slice(0, 4), slice(4, 4), slice(4, 10))
    ]
    assert float(sum(parts)) == pytest.approx(float(whole))


@pytest.mark.parametrize("kind", sorted(set(LOSSES) - {"k2_sequence"}))
def test_on_policy_all_are_a_plain_policy_gradient(kind: str):
    """At ratio 1 each is -A times its own norm: a token's (1/N, 1/(B L)), a sequence's
    (1/(B |y|))."""
    _, _, gain = draw()
    found = gradient(kind, torch.zeros(10), gain.float(), LossConfig(max_tokens=50), SEQUENCE)
    lengths = torch.tensor(LENGTHS)[SEQUENCE].float()
    norm = {
        "grpo": 1 / (4 * lengths),
        "gspo": 1 / (4 * lengths),
        "dr_grpo": torch.full_like(lengths, 1 / (4 * 50)),
    }.get(kind, torch.full_like(lengths, 1 / 10))
    assert torch.allclose(found, -gain.float() * norm)


def test_k2_sequence_is_least_where_the_log_ratio_is_the_advantage():
    """log r(y) = A / tau; the gradient is zero there and points there from elsewhere."""
    tau, advantage = 0.2, 0.5
    config = LossConfig(kind="k2_sequence", tau=tau)
    at = torch.full((4,), advantage / tau / 4)
    zeros = torch.zeros(4, dtype=torch.long)
    assert (
        gradient("k2_sequence", at, torch.full((4,), advantage), config, zeros).abs().max() < 1e-6
    )
    below = gradient("k2_sequence", at - 0.1, torch.full((4,), advantage), config, zeros)
    assert (below < 0).all(), "more probability lowers the loss"
    # by hand: d/d logp of (A - tau s)^2 = -2 tau (A - tau s)
    assert below.tolist() == pytest.approx(
        [-2 * tau * (advantage - tau * (2.5 - 0.4))] * 4, rel=1e-4
    )


def test_gspo_clips_whole_sequences():
    """By the geometric mean: one wild token among quiet ones does not cut, four that drift do."""
    config = LossConfig(ratio_low=0.9, ratio_high=1.1)
    log_ratio = torch.tensor([0.3, -0.1, -0.1, -0.1, 0.15, 0.15, 0.15, 0.15])
    sequence = torch.tensor([0] * 4 + [1] * 4)
    new = (log_ratio - 2.0).requires_grad_()
    tokens = tokens_of(new, torch.full((8,), -2.0), torch.ones(8), sequence)
    loss, cut = LOSSES["gspo"](tokens, config)
    loss.backward()
    assert new.grad is not None and int(cut) == 4
    assert (new.grad[:4] == new.grad[0]).all() and new.grad[0] < 0
    assert (new.grad[4:] == 0).all()


def test_cispo_keeps_every_gradient():
    """Where PPO's clip drops a token, CISPO's gradient is the clipped weight's."""
    config = LossConfig(ratio_low=0.8, ratio_high=1.2)
    log_ratio = torch.tensor([1.0, 0.0])
    found = gradient("cispo", log_ratio, torch.ones(2), config)
    assert found.tolist() == pytest.approx([-1.2 / 2, -1.0 / 2])
    assert gradient("ppo_clip", log_ratio, torch.ones(2), config)[0] == 0


def test_grpo_makes_tokens_of_long_answers_cheap_and_dr_grpo_does_not():
    """The documented trap, by numbers: a wrong answer four times as long."""
    advantages = torch.tensor([-1.0] * 2 + [-1.0] * 8)
    sequence = torch.tensor([0] * 2 + [1] * 8)
    config = LossConfig(max_tokens=8)
    trap = gradient("grpo", torch.zeros(10), advantages, config, sequence)
    fair = gradient("dr_grpo", torch.zeros(10), advantages, config, sequence)
    assert trap[0] == pytest.approx(4 * float(trap[-1])) and fair[0] == fair[-1]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"kind": "k2_sequence"}, "tau = 0 leaves k2_sequence without a gradient"),
        ({"correction": {"kind": "icepop"}}, "correction 'icepop' is for old = 'learner'"),
        ({"kind": "grp"}, "grpo"),
    ],
)
def test_losses_that_cannot_be_meant(bad: dict[str, object], said: str):
    with pytest.raises(ValueError, match=said):
        LossConfig.model_validate(bad)
