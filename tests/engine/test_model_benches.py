"""The benches of the model run, agree with their references, and show what docs say they show."""

from __future__ import annotations

import pytest
import torch

from engine.bench import balance, experts


def test_experts_agree_with_all_references():
    """Smoke size: outputs and gradients of the four implementations are the same numbers."""
    shape = experts.Shape(num_tokens=96, num_experts=8, top_k=3, hidden=32, width=16)
    results = experts.measure(shape, 1)
    for name, result in results.items():
        assert len(result.outputs) == 5, name
        for mine, theirs in zip(results["ours"].outputs, result.outputs, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert "x ours, peak" in experts.report(shape, results)


def test_balance_at_smoke_size():
    """32 experts top-2: a skewed load becomes even."""
    found = balance.measure(
        num_experts=32,
        top_k=2,
        hidden=8,
        steps=500,
        batch=512,
        anneal_steps=60,
        anneal_batch=2048,
        skew=1.0,
    )
    assert found.before > 1 and found.annealed < 0.1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("centred", [False, True])
def test_balance_reaches_the_bar(centred: bool):
    """CV over 524,288 tokens: > 1, then <= 0.05, then <= 0.032 annealed."""
    found = balance.measure(centred=centred)
    assert found.before > 1 and found.after <= 0.05 and found.annealed <= 0.032
    assert found.alarms_after == 0
