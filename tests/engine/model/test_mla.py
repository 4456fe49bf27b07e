"""Latent attention beyond parity: in the engine, under QK-Clip, and on the meta device."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from engine.light.engine import LightEngine
from engine.model.attention import LatentAttention
from engine.model.sequences import forward_sequences
from engine.runtime.types import ContextPolicy, DrawKey, StepRequest, StepResult
from parl.learner.optim.qk_clip import QKClip
from tests.engine.tiny import ENGINE, MLA, make_engine, make_model


def run(engine: LightEngine, prompts: list[list[int]]) -> list[StepResult]:
    async def all_of_them() -> list[StepResult]:
        contexts = [
            await engine.init_context(prompt, ContextPolicy(draw=DrawKey(3, sample=sample)))
            for sample, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*(engine.forward_step(StepRequest(c, 20)) for c in contexts))

    try:
        return asyncio.run(all_of_them())
    finally:
        engine.close()


@pytest.mark.parametrize("deterministic", [True, False])
def test_engine_pages_the_latent(deterministic: bool):
    """The engine's absorbed, paged logprobs are the learner's plain, padded ones; and a row's bits
    do not depend on its batch."""
    config = ENGINE.model_copy(update={"deterministic": deterministic})
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 83, size).tolist() for size in (50, 7, 33)]
    results = run(make_engine(config, MLA), prompts)
    model = make_model(MLA)
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([prompt + result.token_ids.tolist()])
        with torch.no_grad():
            hidden, _, _ = forward_sequences(model, ids, torch.tensor([ids.shape[1]]))
            logprobs = model.logits(hidden).log_softmax(-1)[len(prompt) - 1 : -1]
        picked = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        np.testing.assert_allclose(result.logprobs, picked, atol=1e-5)
    if deterministic:
        alone = run(make_engine(config, MLA), prompts[:1])[0]
        assert alone.token_ids.tolist() == results[0].token_ids.tolist()
        assert alone.logprobs.tobytes() == results[0].logprobs.tobytes()


def test_qk_clip_scales_scores_exactly():
    """A head over tau comes down to tau, the others stay; the shared key is untouched."""
    model = make_model(MLA)
    ids = torch.randint(0, 83, (2, 30), generator=torch.Generator().manual_seed(1))
    clip = QKClip(model, tau=1e9)

    def highest() -> torch.Tensor:
        with torch.no_grad():
            forward_sequences(model, ids, torch.tensor([30, 21]), watch=clip.watch)
        seen = clip.max_scores.clone()
        clip.max_scores.zero_()
        return seen

    before = highest()
    tau = float(before[0].median())
    attention = model.layers[0].self_attn
    assert isinstance(attention, LatentAttention)
    shared = attention.kv_a_proj_with_mqa.clone()
    QKClip(model, tau).step(torch.cat([before[:1], torch.zeros(2, 4)]))
    torch.testing.assert_close(highest()[0], before[0].clamp(max=tau), rtol=1e-5, atol=1e-6)
    assert torch.equal(attention.kv_a_proj_with_mqa, shared)
