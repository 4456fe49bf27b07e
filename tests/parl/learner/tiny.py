"""A policy of a few thousand parameters and rounds of samples for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.model.sequences import forward_sequences
from parl.learner.config import LearnerConfig
from parl.learner.learner import AllReduce, TokenLearner
from parl.trajectory import TrainingSample

MODEL = ModelConfig(
    vocab_size=23,
    hidden_size=16,
    num_hidden_layers=2,
    moe_intermediate_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=64,
)


def make_model(seed: int = 3) -> PolicyModel:
    """Random everywhere: the shipped zero head would give every token the same probability."""
    model = PolicyModel(MODEL, seed)
    generator = torch.Generator().manual_seed(seed)
    assert model.lm_head is not None
    with torch.no_grad():
        model.lm_head.copy_(torch.randn(model.lm_head.shape, generator=generator) * 0.3)
    return model


def make_learner(all_reduce: AllReduce | None = None, **sections: Any) -> TokenLearner:
    return TokenLearner(make_model(), LearnerConfig.model_validate(sections), all_reduce)


def own_logprobs(model: PolicyModel, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [T] log-probability of each token, 0 for the first; int16 [T-1, L, K] experts), by
    the whole [T, V] log-softmax of one unpadded sequence."""
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    with torch.no_grad():
        hidden, chosen, _ = forward_sequences(model, ids, torch.tensor([ids.shape[1]]))
        table = model.logits(hidden).log_softmax(-1)
    picked = table[:-1].gather(1, ids[0, 1:, None])[:, 0]
    logprobs = np.concatenate([np.zeros(1, np.float32), picked.numpy()])
    return logprobs, chosen[:-1].numpy().astype(np.int16)


def make_samples(
    model: PolicyModel, count: int = 12, *, seed: int = 0, experts: bool = True
) -> list[TrainingSample]:
    """On-policy samples of 4 to 30 tokens; about half the tokens after the first are trained."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        ids = rng.integers(0, MODEL.vocab_size, int(rng.integers(4, 31))).astype(np.int32)
        mask = (rng.random(len(ids)) < 0.5).astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        logprobs, chosen = own_logprobs(model, ids)
        samples.append(
            TrainingSample(
                key=(0, index // 4, index % 4),
                token_ids=ids,
                loss_mask=mask,
                logprobs=logprobs * mask,
                experts=chosen if experts else None,
                weight_version=0,
            )
        )
    return samples


def make_advantages(count: int, seed: int = 1) -> list[float]:
    return [float(a) for a in np.random.default_rng(seed).normal(size=count)]
