"""Rollouts with hybrid attention, real ledger and learner: the same logprobs on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from engine.errors import AttentionError
from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from parl.config import RunConfig
from parl.learner.batching import micro_batches
from parl.learner.forward import TokenStats, token_stats
from parl.trajectory import TrainingSample, Trajectory
from tests.parl.rounds.world import Run, tiny_config

SYSTEM = "Look keys up in the store, add what you found, and say the number. " * 2
"""So long that every sampled token reads codes."""


def config(**engine: bool) -> RunConfig:
    """hot = 64, window = 32, always sparse; a policy that has learnt next to nothing."""
    attention = {
        "mode": "hybrid",
        "hot": 64,
        "hybrid": {"window": 32, "topk": 16, "dense_below": 0},
    }
    tiny = tiny_config(
        chat={"system": SYSTEM},
        model={"num_hidden_layers": 3, "head_dim": 32, "attention": attention},
        engine={"block_size": 32, **engine},
        rollout={"num_prompts": 2, "max_turns": 2},
        warm_start={"sloppy_steps": 1, "batch_size": 4},
    )
    # every episode counts, whatever its reward
    return RunConfig.model_validate(tiny.model_dump() | {"learner": {"skip_zero_advantage": False}})


@dataclass(frozen=True)
class Round:
    """``model``: what the engine sampled from; ``metrics``: of the round's learner step."""

    model: PolicyModel
    trajectories: list[Trajectory]
    samples: list[TrainingSample]
    metrics: dict[str, float]


@torch.no_grad()
def sharpen(model: PolicyModel) -> None:
    """Untrained attention looks everywhere alike and an untrained head hardly at all: one code more
    or less would not be seen in any logprob."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in model.named_parameters():
        if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
            tensor.mul_(2)
    assert model.lm_head is not None
    model.lm_head.normal_(std=0.2, generator=generator)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Round]:
    with Run.open(tmp_path_factory.mktemp("hybrid"), config()) as run:
        sharpen(run.learner.model)
        run.warm_start()
        model = deepcopy(run.learner.model)
        metrics = run.machine.step().metrics
        trajectories = run.store.load_trajectories("train", 0)
        samples = [trajectory.to_training_sample() for trajectory in trajectories]
        yield Round(model, trajectories, samples, metrics)


def forward(
    model: PolicyModel, samples: list[TrainingSample], *, with_codes: bool = True
) -> list[TokenStats]:
    """The learner's forward, several sequences of different lengths at a time."""
    batches = micro_batches(
        samples,
        [1.0] * len(samples),
        1024,
        with_experts=True,
        with_selections=True,
        with_codes=with_codes,
    )
    with torch.no_grad():
        return [token_stats(model, batch) for batch in batches]


def largest_dlogp(stats: list[TokenStats]) -> float:
    """Of all tokens, flipped or not."""
    return max(float((s.logprobs - s.old_logprobs).abs().max()) for s in stats)


def test_engine_and_learner_agree_on_every_token(played: Round):
    """fp32 with INT8 codes, retrieval and sink; experts, selections and codes come from the ledger:
    1e-4 on all tokens, flipped ones included."""
    assert len(played.trajectories) == 8
    for trajectory in played.trajectories:
        assert all(turn.warm_reads > 0 and turn.retrieved > 0 for turn in trajectory.turns)
    found = forward(played.model, played.samples)
    codes, flips = sum(s.codes for s in found), sum(s.code_flips for s in found)
    assert largest_dlogp(found) < 1e-4
    without = forward(played.model, played.samples, with_codes=False)
    assert largest_dlogp(without) > 5 * largest_dlogp(found)
    # 32 codes a channel, a scale and a minimum; 32 codes a value channel, 32 scales
    a_block = 3 * (34 * 32 + 32 * 33)
    assert codes == a_block * sum(len(s.codes) for s in played.samples if s.codes is not None)
    assert flips <= 0.001 * codes
    assert played.metrics["max_abs_dlogp"] < 1e-4
    assert played.metrics["kv_code_flip_share"] == flips / codes


def test_every_sequence_has_all_its_codes(played: Round):
    """Forks of one prompt too: blocks 1, 2, ... up to what the last input's query reads."""
    for sample in played.samples:
        assert sample.codes is not None
        assert len(sample.codes) == (len(sample.token_ids) - 1 - 64) // 32 - 1 > 0


def test_a_code_that_differs_is_read_and_counted(played: Round):
    """The engine's code of one channel is 64 steps away: logprobs move, one more flip."""
    one = played.samples[0]
    assert one.codes is not None
    codes = one.codes.copy()
    codes[0, 0] ^= 1
    (right,), (wrong,) = (forward(played.model, [s]) for s in (one, replace(one, codes=codes)))
    assert abs(wrong.code_flips - right.code_flips) == 1
    assert not torch.equal(wrong.logprobs, right.logprobs)


def test_codes_that_do_not_fit_are_refused(played: Round):
    """Codes of another profile, and of a hot zone that is shorter than the learner's."""

    def like(**attention: Any) -> PolicyModel:
        fields = played.model.config.model_dump()
        return PolicyModel(
            ModelConfig.model_validate(fields | {"attention": fields["attention"] | attention}), 0
        )

    with pytest.raises(AttentionError, match="bytes a block"):
        forward(like(profile="k8v4"), played.samples[:1])
    for hot in (128, 1024):
        with pytest.raises(AttentionError, match=f"turn warm with hot = {hot}"):
            forward(like(hot=hot), played.samples[:1])


def test_a_learner_wants_what_the_engine_reports():
    with pytest.raises(ValueError, match=r"engine.report_codes = false"):
        config(report_codes=False)
