"""Selection for latent attention by reduced keys, against the exact choice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.attention.config import HybridConfig
from engine.attention.hybrid import attend_hybrid
from engine.attention.latent import scored_channels
from engine.attention.sequence import attend_sequence, view_of
from engine.attention.view import LayerView
from engine.errors import AttentionError
from engine.model.config import ModelConfig
from engine.model.latent_axes import principal_axes

RANK, ROPE, HEADS = 64, 16, 16
HOT = 70


def latent_case(length: int, turned: bool) -> tuple[Tensor, Tensor]:
    """q [T, A, D], k [T, 1, D]: latents whose spectrum falls as 1 / i, as those of trained models
    do (a tenth of the channels holds two thirds of the variance), a rotary part, and a few topics
    that heads ask for. ``turned``: to the principal axes of another sample."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    basis = torch.linalg.qr(normal(RANK, RANK))[0]
    spectrum = 1 / torch.arange(1, RANK + 1).float()
    latents, others = ((normal(length, RANK) * spectrum) @ basis.T + 0.2 for _ in range(2))
    q = normal(length, HEADS, RANK) @ torch.diag(1 + 0.3 * normal(RANK))
    if turned:
        axes = principal_axes(others)
        latents, q = latents @ axes, q @ axes
    rope_k, rope_q = 0.3 * normal(length, ROPE), normal(length, HEADS, ROPE)
    k = torch.cat([latents, rope_k], dim=-1)[:, None]
    return 6 * torch.cat([q, rope_q], dim=-1), k


def config(**changes: object) -> HybridConfig:
    base = {
        "window": 64,
        "topk": 96,
        "candidates": 192,
        "latent_dims": 16,
        "dense_below": 0,
        "native": "off",
    }
    return HybridConfig.for_latent(**(base | changes))


def chosen(q: Tensor, view: LayerView, settings: HybridConfig) -> set[int]:
    found = attend_hybrid(q, view, settings).selected
    assert found is not None and found.shape[:2] == (1, 1), "one choice for all heads"
    return {int(p) for p in found.flatten() if p >= 0}


def recall_of(turned: bool, **changes: object) -> float:
    """Share of the exact choice, the mean of four queries of a context of 1,200."""
    q, k = latent_case(1200, turned)
    total = 0.0
    for t in (900, 1000, 1100, 1200):
        view = view_of(k[:t], None, HOT, value_dim=RANK)
        exact = chosen(q[t - 1], view, config(index="bf16", candidates=t))
        total += len(exact & chosen(q[t - 1], view, config(**changes))) / len(exact)
    return total / 4


def test_a_quarter_of_turned_channels_finds_the_exact_choice():
    """And untuned channels do not, so the turn is what it lives on."""
    turned, plain = recall_of(True), recall_of(False)
    assert turned >= 0.95, (turned, plain)
    assert plain < turned - 0.05


def test_all_channels_are_the_exact_choice():
    assert recall_of(True, latent_dims=RANK) == 1.0
    assert recall_of(True, candidates=2000) == 1.0


def test_decode_and_sequence_choose_and_read_the_same():
    q, k = latent_case(300, True)
    settings = config(topk=16, candidates=48)
    whole = attend_sequence(q, k, None, settings, HOT, value_dim=RANK)
    for t in (129, 230, 300):
        view = view_of(k[:t], None, HOT, value_dim=RANK)
        step = attend_hybrid(q[t - 1], view, settings)
        torch.testing.assert_close(step.out, whole.out[t - 1], atol=1e-5, rtol=1e-5)
        assert step.selected is not None
        assert torch.equal(step.selected, whole.selected[t - 1])


def test_what_has_no_latent_is_refused():
    q, k = latent_case(200, True)
    with pytest.raises(AttentionError, match="is for latent attention"):
        attend_hybrid(q[-1], view_of(k, k, HOT), config(index="latent", topk=8, candidates=16))
    with pytest.raises(AttentionError, match="latent_dims = 96 of a latent with 64"):
        scored_channels(RANK + ROPE, RANK, 96)
    section = {"mode": "hybrid", "hybrid": {"index": "latent"}}
    with pytest.raises(ValueError, match=r"expected attention\.kind='mla'"):
        ModelConfig(attention=section)  # pyright: ignore[reportArgumentType]
