"""The demo's policy never changes by accident: names, order, initial values, logits, gradients."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.model.sequences import forward_sequences

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/data/model/demo_policy.json"


def fingerprint() -> str:
    """What decides the bits of a float operation here."""
    with Path("/proc/cpuinfo").open() as lines:
        cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")
    return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {cpu}"


def sha256(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def observe() -> dict[str, object]:
    """Everything the closed loop depends on, from the demo's own configuration on one thread."""
    config = ModelConfig.model_validate(
        tomllib.loads((ROOT / "configs/demo.toml").read_text())["model"]
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = PolicyModel(config, seed=1)
        fresh = sha256(list(model.state_dict().values()))
        generator = torch.Generator().manual_seed(5)
        assert model.lm_head is not None
        with torch.no_grad():
            model.lm_head.copy_(torch.randn(model.lm_head.shape, generator=generator) * 0.1)
        ids = torch.randint(config.vocab_size, (3, 40), generator=generator)
        hidden, chosen, _ = forward_sequences(model, ids, torch.tensor([40, 31, 7]))
        logits = model.logits(hidden)
        (logits.log_softmax(-1)[:, 7].mean() + logits.square().mean()).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
    finally:
        torch.set_num_threads(threads)
    return {
        "parameters": [[name, list(p.shape)] for name, p in model.named_parameters()],
        "buffers": [[name, list(b.shape)] for name, b in model.named_buffers()],
        "logits": logits.detach()[::13, ::37].double().numpy().round(6).tolist(),
        "gradient_norms": [round(float(g.norm()), 6) for g in grads],
        "machine": fingerprint(),
        "sha256": {
            "fresh": fresh,
            "logits": sha256([logits]),
            "choices": sha256([chosen]),
            "gradients": sha256(grads),
        },
    }


def test_demo_policy_is_unchanged():
    """Within rounding on every machine."""
    golden, now = json.loads(GOLDEN.read_text()), observe()
    assert now["parameters"] == golden["parameters"]
    assert now["buffers"] == golden["buffers"]
    np.testing.assert_allclose(np.array(now["logits"]), golden["logits"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        np.array(now["gradient_norms"]), golden["gradient_norms"], rtol=1e-3, atol=1e-5
    )


def test_demo_policy_is_unchanged_to_the_bit():
    """Where the arithmetic is that of the machine that wrote the golden."""
    golden, now = json.loads(GOLDEN.read_text()), observe()
    if golden["machine"] != now["machine"]:
        pytest.skip(f"golden bits are those of {golden['machine']}, here is {now['machine']}")
    assert now["sha256"] == golden["sha256"]
