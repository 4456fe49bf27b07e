"""TokenLearner: one step is a function of state and batch, bit for bit."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parl.learner.batching import micro_batches, shards
from parl.learner.config import OptimConfig
from parl.learner.forward import token_stats
from parl.learner.learner import TokenLearner, rate_scale
from parl.trajectory import TrainingSample
from tests.parl.learner.tiny import make_advantages, make_learner, make_model, make_samples

GAINS = make_advantages(12)


@pytest.fixture
def samples() -> list[TrainingSample]:
    return make_samples(make_model())


def difference(first: TokenLearner, second: TokenLearner) -> float:
    one, other = first.weights(), second.weights()
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def total_logprob(learner: TokenLearner, rows: list[TrainingSample]) -> float:
    with torch.no_grad():
        batches = micro_batches(rows, [0.0] * len(rows), 512, with_experts=False)
        return sum(float(token_stats(learner.model, b).logprobs.sum()) for b in batches)


def test_logprobs_are_those_of_the_whole_softmax(samples: list[TrainingSample]):
    """Padded micro-batches with logits only at trained tokens, against [T, V] one by one."""
    metrics = make_learner().update(samples, GAINS)
    assert metrics["max_abs_dlogp"] < 1e-5 and metrics["expert_flip_share"] == 0
    assert abs(metrics["mismatch_kl"]) < 1e-6 and metrics["masked_share"] == 0
    assert metrics["num_tokens"] == sum(int(s.loss_mask.sum()) for s in samples)
    assert metrics["peak_memory_mib"] > 0 and metrics["entropy"] > 0


@pytest.mark.parametrize("kind", ["k25_token_mask", "ppo_clip"])
def test_a_step_follows_the_advantage(kind: str, samples: list[TrainingSample]):
    """Samples with a positive advantage become likelier, those with a negative one less likely."""
    learner = make_learner(loss={"kind": kind})
    good, bad = samples[:6], samples[6:]
    before = total_logprob(learner, good), total_logprob(learner, bad)
    learner.update(samples, [1.0] * 6 + [-1.0] * 6)
    assert total_logprob(learner, good) > before[0] and total_logprob(learner, bad) < before[1]


def test_cross_entropy_falls(samples: list[TrainingSample]):
    """Twenty supervised steps on one batch learn it."""
    learner = make_learner()
    losses = [learner.sft_update(samples, 0.01, 3e-3)["loss"] for _ in range(20)]
    assert losses[-1] < losses[0] * 0.9


def test_order_of_samples_does_not_matter_to_a_bit(samples: list[TrainingSample]):
    """Samples come sorted from the ledger, but nothing depends on it."""
    order = list(range(12))
    random.Random(5).shuffle(order)
    one, other = make_learner(), make_learner()
    one.update(samples, GAINS)
    other.update([samples[i] for i in order], [GAINS[i] for i in order])
    assert difference(one, other) == 0


def test_size_of_micro_batches_is_no_matter_of_learning(samples: list[TrainingSample]):
    """Gradient accumulation under one norm: the step of one big batch, up to rounding."""
    one, other = make_learner(micro_batch_tokens=4096), make_learner(micro_batch_tokens=32)
    first, second = one.update(samples, GAINS), other.update(samples, GAINS)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-5)
    assert first["loss"] == pytest.approx(second["loss"], abs=1e-6)
    # Muon's bf16 iteration turns rounding of a gradient into steps of about lr * 2^-8
    assert difference(one, other) < 1e-4


def test_leaving_out_zero_advantages_changes_nothing_but_the_work(samples: list[TrainingSample]):
    """Their gradient is zero and they still count in the norm."""
    gains = [g if i % 3 else 0.0 for i, g in enumerate(GAINS)]
    one, other = make_learner(), make_learner(skip_zero_advantage=False)
    first, second = one.update(samples, gains), other.update(samples, gains)
    assert first["num_tokens"] == second["num_tokens"]
    assert (first["num_sequences"], second["num_sequences"]) == (8, 12)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-5)
    pulled = make_learner(loss={"tau": 0.1}).update(samples, gains)
    assert pulled["num_sequences"] == 12


def test_off_policy_tokens_are_masked_and_measured(samples: list[TrainingSample]):
    """Engine log-probabilities two nats off: every token masked, no policy gradient, and the
    mismatch is what it is."""
    moved = [replace(s, logprobs=s.logprobs - 2 * s.loss_mask) for s in samples]
    metrics = make_learner().update(moved, GAINS)
    assert metrics["masked_share"] == 1 and metrics["grad_norm"] == 0
    assert metrics["mean_abs_dlogp"] == pytest.approx(2, abs=1e-4)
    # k3 estimator: e^2 - 1 - 2
    assert metrics["mismatch_kl"] == pytest.approx(np.exp(2) - 3, rel=1e-4)


def rerouted(sample: TrainingSample, positions: slice) -> TrainingSample:
    """As if the engine had used the next expert up at ``positions``."""
    assert sample.experts is not None
    experts = sample.experts.copy()
    experts[positions] = np.sort((experts[positions] + 1) % 4, axis=-1)
    return replace(sample, experts=experts)


def test_recorded_experts_are_replayed(samples: list[TrainingSample]):
    """Experts the router would not have chosen are used all the same, and counted."""
    other = [rerouted(s, slice(None, None, 2)) for s in samples]
    replayed = make_learner().update(other, GAINS)
    ignored = make_learner(replay_experts=False).update(other, GAINS)
    assert replayed["expert_flip_share"] > 0.3 and ignored["expert_flip_share"] == 0
    assert replayed["grad_norm"] != ignored["grad_norm"]
    assert ignored["max_abs_dlogp"] < 1e-5


def test_tokens_with_a_flip_are_left_out_of_the_mismatch(samples: list[TrainingSample]):
    """Only what predicts the last token is rerouted: that token differs and is not counted, all
    others agree as before. The KL counts it."""
    metrics = make_learner().update([rerouted(s, slice(-1, None)) for s in samples], GAINS)
    assert metrics["expert_flip_share"] > 0
    assert metrics["max_abs_dlogp"] < 1e-5 < metrics["mismatch_kl"]


def test_router_bias_moves_only_when_asked(samples: list[TrainingSample]):
    """rate 0 leaves it; else it steps by the rate towards equal loads."""
    still, moving = make_learner(), make_learner(router_bias_rate=0.01)
    for learner in (still, moving):
        learner.update(samples, GAINS)
    name = "layers.0.mlp.gate.e_score_correction_bias"
    assert not still.weights()[name].any()
    moved = np.abs(moving.weights()[name])
    assert moved.max() > 0
    assert all(step in (0, np.float32(0.01)) for step in moved)


def test_published_weights_do_not_change_with_the_next_step(samples: list[TrainingSample]):
    """weights() copies."""
    learner = make_learner()
    published = learner.weights()
    before = {name: value.copy() for name, value in published.items()}
    learner.update(samples, GAINS)
    assert all(np.array_equal(published[name], before[name]) for name in before)
    assert all(value.dtype == np.float32 for value in published.values())


def test_a_batch_that_trains_nothing_is_refused(samples: list[TrainingSample]):
    """No norm, no step: dividing by it would write nan into every parameter."""
    silent = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in samples]
    learner = make_learner()
    with pytest.raises(AssertionError, match="is trained on"):
        learner.update(silent, GAINS)
    with pytest.raises(AssertionError, match="12 samples with 3 advantages"):
        learner.update(samples, GAINS[:3])


# -- several ranks ------------------------------------------------------------------------------


class Ranks:
    """A real sum over threads: each rank waits for all others, adds in rank order."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=30)
        self._slots: list[Tensor] = [torch.empty(0)] * count

    def sum_for(self, rank: int):
        def all_reduce(tensor: Tensor) -> Tensor:
            self._slots[rank] = tensor
            self._barrier.wait()
            total = torch.stack(self._slots).sum(dim=0)
            self._barrier.wait()
            return total

        return all_reduce


def run_ranks(
    count: int, rows: list[TrainingSample], gains: list[float], **sections: Any
) -> list[TokenLearner]:
    ranks = Ranks(count)
    learners = [make_learner(ranks.sum_for(rank), **sections) for rank in range(count)]
    parts = shards(rows, count)

    def work(rank: int) -> None:
        part = parts[rank]
        learners[rank].update([rows[i] for i in part], [gains[i] for i in part])
        learners[rank].sft_update([rows[i] for i in part], 1e-3, 1e-4)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return learners


@pytest.mark.parametrize(("count", "num_samples"), [(2, 12), (3, 2)])
def test_ranks_together_take_the_step_of_one(
    count: int, num_samples: int, samples: list[TrainingSample]
):
    """Normalised by the tokens of all ranks; three ranks with two samples leave one idle, which
    must neither hang nor differ."""
    rows, gains = samples[:num_samples], GAINS[:num_samples]
    alone = make_learner(router_bias_rate=0.01)
    alone.update(rows, gains)
    alone.sft_update(rows, 1e-3, 1e-4)
    together = run_ranks(count, rows, gains, router_bias_rate=0.01)
    assert all(difference(together[0], other) == 0 for other in together[1:])
    assert difference(together[0], alone) < 1e-4


def test_summed_gradients_of_two_ranks_are_the_gradient_of_one(samples: list[TrainingSample]):
    """Before clipping and Muon's bf16: equal to 1e-6 of the norm."""
    flats: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() > 1:
            flats.append(tensor.double())
        return tensor

    make_learner(keep).update(samples, GAINS)
    ranks = Ranks(2)
    parts = shards(samples, 2)

    def work(rank: int) -> None:
        add = ranks.sum_for(rank)
        learner = make_learner(lambda t: keep(add(t)) if rank == 0 else add(t))
        learner.update([samples[i] for i in parts[rank]], [GAINS[i] for i in parts[rank]])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone, together = flats
    assert float((alone - together).norm() / alone.norm()) < 1e-6


def test_zero_advantages_leave_the_gradient_alone(samples: list[TrainingSample]):
    """Skipped or computed, the whole gradient is the same at tau = 0, to 1e-6 of its norm."""
    flats: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() > 1:
            flats.append(tensor.double())
        return tensor

    gains = [g if i % 3 else 0.0 for i, g in enumerate(GAINS)]
    for skip in (True, False):
        make_learner(keep, skip_zero_advantage=skip).update(samples, gains)
    assert float((flats[0] - flats[1]).norm() / flats[1].norm()) < 1e-6


def test_flip_share_counts_every_changed_choice(samples: list[TrainingSample]):
    """One position of one layer moved in one sample: exactly 1 of (positions x layers)."""
    first = samples[0]
    assert first.experts is not None
    experts = first.experts.copy()
    # the last position with a record feeds no later one
    experts[-1, -1] = np.setdiff1d(np.arange(4), experts[-1, -1])[:2]
    metrics = make_learner().update([replace(first, experts=experts)], [1.0])
    positions, layers = experts.shape[:2]
    assert metrics["expert_flip_share"] == pytest.approx(1 / (positions * layers))


def test_rates_fall_linearly_to_their_last_share():
    """From the first update to update decay_updates, and stay there; 0 keeps them constant."""
    config = OptimConfig(decay_updates=4, final_share=0.2)
    assert [rate_scale(n, config) for n in range(6)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert rate_scale(7, OptimConfig()) == 1.0


def test_updates_use_the_decayed_rates(samples: list[TrainingSample], tmp_path: Path):
    """The scale follows the count of updates, also that of a restored learner."""
    optim = {"muon_lr": 1e-2, "adamw_lr": 1e-3, "decay_updates": 2, "final_share": 0.5}
    learner = make_learner(optim=optim)
    assert learner.update(samples, GAINS)["rate_scale"] == 1.0
    learner.save(tmp_path)
    again = make_learner(optim=optim)
    again.restore(tmp_path)
    assert again.update(samples, GAINS)["rate_scale"] == 0.75
    assert again.muon.param_groups[0]["lr"] == pytest.approx(0.75e-2)
    assert again.adamw.param_groups[0]["lr"] == pytest.approx(0.75e-3)
