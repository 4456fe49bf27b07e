"""LightEngine with summaries, cold blocks and latent selection: what the learner computes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.sequence import attend_sequence
from engine.attention.summary_adapters import MeanAdapters
from engine.attention.summary_files import save_adapters
from engine.errors import AttentionError
from engine.kvcache.config import TierConfig
from engine.light.engine import LightEngine
from engine.model.config import ModelConfig
from engine.model.latent_axes import turn_latents
from engine.model.sequences import forward_sequences
from engine.model.summaries import adapters_of, geometry_of, summarise_with
from engine.runtime.types import StepRequest, StepResult
from tests.engine.light.test_hybrid import (
    CONFIG,
    LATENT,
    OBSERVED,
    PROMPT,
    Trace,
    alone_in,
    hybrid,
    policy,
    run,
    turns,
)
from tests.engine.tiny import HYBRID, MLA, make_model, make_weights

COLD = CONFIG.model_copy(update={"tiers": TierConfig(warm=32)})


def with_adapters(folder: Path, model: ModelConfig = HYBRID) -> ModelConfig:
    """Maps and gates that change something, in a file."""
    adapters = MeanAdapters(geometry_of(model))
    generator = torch.Generator().manual_seed(5)
    for parameter in (adapters.to_key, adapters.to_value, adapters.gate):
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    path = folder / "adapters.safetensors"
    save_adapters(adapters, path, "tiny")
    return hybrid(model, hybrid={"summary_weight": 0.7, "summary_adapters": path})


def tokens_of(trace: Trace) -> list[int]:
    return PROMPT + trace.token_ids[:20].tolist() + OBSERVED + trace.token_ids[20:].tolist()


def sampled_logprobs(logprobs: Tensor, tokens: Sequence[int]) -> list[float]:
    places = [len(PROMPT) + i for i in range(20)]
    places += [len(PROMPT) + 20 + len(OBSERVED) + i for i in range(20)]
    return [float(logprobs[p - 1, tokens[p]]) for p in places]


def learners(model: ModelConfig, trace: Trace, warm: int | None = None) -> list[float]:
    """forward_sequences over what the engine saw, with its choices; ``warm`` None, or
    attend_sequence by hand with a bounded warm tier."""
    policy_model, tokens = make_model(model), tokens_of(trace)
    ids = torch.tensor(tokens[:-1])
    experts = torch.from_numpy(trace.experts.astype(np.int64))
    selections = torch.from_numpy(trace.selections)
    adapters, attention = adapters_of(model), model.attention

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_sequence(
            q,
            k,
            v,
            attention.hybrid,
            attention.hot,
            replay=selections[:, layer],
            warm=warm,
            summarise=summarise_with(adapters, layer),
        ).out

    with torch.no_grad():
        if warm is None:
            hidden, _, _ = forward_sequences(
                policy_model,
                ids[None],
                torch.tensor([len(ids)]),
                experts[None],
                selections=selections[None],
            )
        else:
            hidden, _ = policy_model(ids, torch.arange(len(ids)), attend, experts=experts)
        return sampled_logprobs(policy_model.logits(hidden).log_softmax(-1), tokens)


def test_the_learner_reads_the_engines_summaries(tmp_path: Path):
    """With choices replayed the log-probabilities agree, and without summaries they are others."""
    model = with_adapters(tmp_path)
    trace = Trace.of(alone_in(model))
    np.testing.assert_allclose(learners(model, trace), trace.logprobs, atol=1e-4)
    plain = np.array(learners(hybrid(HYBRID), trace))
    assert np.abs(plain - trace.logprobs).max() > 1e-3


def test_cold_blocks_are_summarised(tmp_path: Path):
    """One warm block; older ones are in host memory, and their summaries are still read."""
    model = with_adapters(tmp_path)
    trace = Trace.of(alone_in(model, COLD))
    np.testing.assert_allclose(learners(model, trace, warm=32), trace.logprobs, atol=1e-4)
    hidden = Trace.of(alone_in(hybrid(HYBRID), COLD))
    assert np.abs(hidden.logprobs - trace.logprobs).max() > 1e-3


def test_bits_do_not_depend_on_chunks_or_forks(tmp_path: Path):
    model = with_adapters(tmp_path)
    alone = Trace.of(alone_in(model, COLD))

    async def forked(engine: LightEngine) -> list[StepResult]:
        parent = await engine.init_context(PROMPT, policy(5))
        child = await engine.fork(parent)
        await engine.forward_step(StepRequest(parent, 3))
        await engine.release(parent)
        return await turns(engine, child)

    found = Trace.of(run(forked, model, COLD))
    np.testing.assert_array_equal(found.logprobs, alone.logprobs)

    async def chunked(engine: LightEngine) -> list[StepResult]:
        ctx = await engine.init_context(PROMPT[:1], policy(5))
        for start in range(1, len(PROMPT), 32):
            await engine.append(ctx, PROMPT[start : start + 32])
            # a fork computes all of the parent's tokens but the last
            await engine.release(await engine.fork(ctx))
        return await turns(engine, ctx)

    Trace.of(run(chunked, model, COLD)).check(alone)


@pytest.mark.parametrize("model", [LATENT, None], ids=["codes", "latent"])
@pytest.mark.slow
def test_latent_selection_is_the_learners(model: ModelConfig | None):
    """MLA, absorbed; index latent scans 8 of 12 latent channels and the 4 rotary ones."""
    chosen = {"index": "latent", "latent_dims": 8, "share": "softmax", "topk_shared": True}
    model = hybrid(MLA, hybrid=chosen) if model is None else model
    trace = Trace.of(alone_in(model))
    np.testing.assert_allclose(learners(model, trace), trace.logprobs, atol=1e-4)
    assert (trace.selections >= 0).any()


def test_turned_latents_leave_the_model_what_it_is():
    """And the first channels then have the most variance."""
    model, turned = make_model(MLA), make_model(MLA)
    ids = torch.tensor(PROMPT)[None]
    rows: list[Tensor] = []

    def hidden(m: torch.nn.Module) -> Tensor:
        rows.clear()

        def watch(layer: int, q: Tensor, k: Tensor) -> None:
            rows.append(k[0, 0, :, : MLA.kv_lora_rank])

        return forward_sequences(
            m,  # pyright: ignore[reportArgumentType]
            ids,
            torch.tensor([len(PROMPT)]),
            absorbed=True,
            watch=watch,
        )[0]

    with torch.no_grad():
        before = hidden(model)
        turn_latents(turned, list(rows))
        after = hidden(turned)
        torch.testing.assert_close(after, before, atol=2e-4, rtol=2e-4)
        for layer in rows:
            spread = layer.var(dim=0)
            assert spread[:4].sum() > 0.5 * spread.sum() and spread.argmax() == 0
    with pytest.raises(AttentionError, match=r"layers of attention\.kind='gqa'"):
        turn_latents(make_model(), list(rows))
    with pytest.raises(AttentionError, match="3 tokens for a latent of 12 channels"):
        turn_latents(turned, [row[:3] for row in rows])


def test_adapters_of_another_model_stop_the_engine(tmp_path: Path):
    model = with_adapters(tmp_path)
    other = ModelConfig.model_validate(model.model_dump() | {"num_hidden_layers": 4})
    with pytest.raises(AttentionError, match="num_layers=3, this one has 4"):
        partial(LightEngine, other, CONFIG)(fetch_weights=lambda _: make_weights(config=other))
