"""Dense to experts: the same logits at first, then a model that trains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.model import PolicyModel
from engine.model.sequences import forward_sequences
from engine.model.upcycle import upcycle
from tests.engine.tiny import MODEL, make_model

DENSE = MODEL.model_copy(update={"first_k_dense_replace": 3, "tie_word_embeddings": True})
IDS = torch.randint(0, 83, (3, 24), generator=torch.Generator().manual_seed(0))


def logits(model: PolicyModel) -> Tensor:
    hidden, _, _ = forward_sequences(model, IDS, torch.tensor([24, 24, 24]))
    return model.logits(hidden)


@pytest.mark.parametrize(
    ("shared", "dense_layers", "top_k"), [(0.0, 0, 2), (0.25, 1, 2), (0.5, 0, 1), (0.0, 2, 8)]
)
@torch.no_grad()
def test_logits_are_those_of_the_dense_model(shared: float, dense_layers: int, top_k: int):
    """Whatever the router chooses; with a shared expert and dense first layers too."""
    dense = make_model(DENSE)
    model = upcycle(dense, 8, top_k, shared=shared, num_dense_layers=dense_layers)
    assert model.config.num_moe_layers == 3 - dense_layers
    torch.testing.assert_close(logits(model), logits(dense), rtol=0, atol=1e-5)


@pytest.mark.parametrize("noise", [-1.0, float("nan"), float("inf")])
def test_noise_is_a_spread(noise: float):
    with pytest.raises(CheckpointError, match="expected a number >= 0"):
        upcycle(make_model(DENSE), 4, 2, noise=noise)


@torch.no_grad()
def test_noise_drives_the_copies_apart():
    """Reproducibly, and only a little at first."""
    dense = make_model(DENSE)
    noisy, again = (upcycle(dense, 4, 2, noise=0.02, seed=5) for _ in range(2))
    assert torch.equal(logits(noisy), logits(again))
    difference = (logits(noisy) - logits(dense)).abs().max()
    assert 1e-5 < float(difference) < 0.5 * float(logits(dense).abs().max())


def test_it_trains():
    """The loss falls, the router gets gradient, and experts come apart."""
    model = upcycle(make_model(DENSE), 4, 2, noise=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    target = IDS.roll(-1, 1).flatten()
    losses = []
    for _ in range(8):
        loss = torch.nn.functional.cross_entropy(logits(model), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    router = dict(model.named_parameters())["layers.0.mlp.gate.weight"]
    assert router.grad is not None and router.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_experts": 2, "top_k": 3}, "top_k=3 of 2 experts"),
        ({"num_experts": 4, "top_k": 2, "shared": 1.0}, "shared=1.0"),
        ({"num_experts": 10**7, "top_k": 2}, "10000000 experts in a layer, expected at most"),
        ({"num_experts": 4, "top_k": 2, "num_dense_layers": 3}, "no layer would get experts"),
    ],
)
def test_numbers_that_do_not_fit(options: dict[str, float], words: str):
    """Named before anything is built."""
    with pytest.raises(CheckpointError, match=words):
        upcycle(make_model(DENSE), **options)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="has 2 expert layers already"):
        upcycle(make_model(MODEL), 4, 2)


def test_a_model_that_the_memory_cannot_hold():
    """Refused before it is built: 60,000 experts of 6 M parameters."""
    wide = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 8}
    dense = make_model(DENSE.model_copy(update={**wide, "num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match="GiB of memory are available: take fewer experts"):
        upcycle(dense, 60_000, 2)
