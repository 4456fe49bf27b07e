"""Engine and learner compute the same policy."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from engine.light.engine import LightEngine
from engine.model.sequences import forward_sequences
from engine.runtime.types import ContextPolicy, DrawKey, StepRequest, StepResult
from tests.engine.tiny import ENGINE, make_engine, make_model

PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, 83, 20)]
OBSERVED = [9, 8, 7, 6]


async def episode(engine: LightEngine, sample: int) -> tuple[list[int], list[StepResult]]:
    ctx = await engine.init_context(PROMPT, ContextPolicy(draw=DrawKey(5, sample=sample)))
    first = await engine.forward_step(StepRequest(ctx, 30 + sample))
    await engine.append(ctx, OBSERVED)
    second = await engine.forward_step(StepRequest(ctx, 30))
    tokens = PROMPT + first.token_ids.tolist() + OBSERVED + second.token_ids.tolist()
    return tokens, [first, second]


@pytest.mark.parametrize("deterministic", [True, False])
def test_logprobs_agree_with_replayed_experts(deterministic: bool):
    """max |engine - learner| < 1e-5 over six two-turn episodes; the routing agrees too."""
    engine = make_engine(ENGINE.model_copy(update={"deterministic": deterministic}))

    async def all_episodes() -> list[tuple[list[int], list[StepResult]]]:
        return await asyncio.gather(*(episode(engine, sample) for sample in range(6)))

    episodes = asyncio.run(all_episodes())
    engine.close()
    longest = max(len(tokens) for tokens, _ in episodes)
    ids = torch.zeros(6, longest, dtype=torch.long)
    experts = torch.zeros(6, longest, 2, 2, dtype=torch.long)
    lengths = torch.tensor([len(tokens) for tokens, _ in episodes])
    for row, (tokens, results) in enumerate(episodes):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        report = np.concatenate([r.experts for r in results if r.experts is not None])
        assert len(report) == len(tokens) - 1
        experts[row, : len(report)] = torch.from_numpy(report.astype(np.int64))
    model = make_model()
    with torch.no_grad():
        hidden, own, rows = forward_sequences(model, ids, lengths, experts)
        logprobs = model.logits(hidden).log_softmax(dim=-1)
    place = {int(row): i for i, row in enumerate(rows)}
    worst, flips = 0.0, 0
    for row, (tokens, results) in enumerate(episodes):
        for result in results:
            for offset, (token, logprob) in enumerate(
                zip(result.token_ids.tolist(), result.logprobs.tolist(), strict=True)
            ):
                predicting = place[row * longest + result.start + offset - 1]
                worst = max(worst, abs(float(logprobs[predicting, token]) - logprob))
        known = [place[row * longest + p] for p in range(len(tokens) - 1)]
        flips += int((own[known] != experts[row, : len(known)]).any(dim=-1).sum())
    assert worst < 1e-5
    assert flips == 0
