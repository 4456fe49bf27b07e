"""The supervised start: what it trains on, at which rates, and that it learns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.chat.renderer import KimiRenderer
from engine.chat.tokenizers import ByteTokenizer
from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from parl.config import WarmStartSection
from parl.learner.config import LearnerConfig
from parl.learner.learner import TokenLearner
from parl.rollout.kimi_chat import KimiChat
from parl.rounds.tasks import TaskSource
from parl.sft.warm_start import WarmStart, lean_tokens
from parl.trajectory import TrainingSample
from sandbox.catalog.registry import get_family

FAMILY = get_family("lookup_calc")
TOKENIZER = ByteTokenizer(words=("functions.lookup:", "functions.calc:", '{"key":"', "assistant"))
RENDERER = KimiRenderer(TOKENIZER, declare_tools="none")
MODEL = ModelConfig(
    vocab_size=TOKENIZER.vocab_size,
    hidden_size=32,
    num_hidden_layers=1,
    moe_intermediate_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)


def warm_start(seed: int = 7, **config: Any) -> WarmStart:
    section = WarmStartSection.model_validate({"num_demonstrations": 8, "batch_size": 8, **config})
    tasks = TaskSource(FAMILY, {"lookup": 0.5, "add": 0.5}, seed, 4)
    return WarmStart(
        section,
        family=FAMILY,
        tasks=tasks.demonstrations,
        chat=KimiChat(RENDERER),
        renderer=RENDERER,
        seed=seed,
    )


class Pupil:
    """A SupervisedLearner that only remembers what it was shown."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.rates: list[tuple[float, float]] = []
        self.num_resets = 0

    def sft_update(
        self, samples: Sequence[TrainingSample], muon_lr: float, adamw_lr: float
    ) -> dict[str, float]:
        self.batches.append([sample.token_ids.tobytes() for sample in samples])
        self.rates.append((muon_lr, adamw_lr))
        return {"loss": 1.0 / len(self.batches), "grad_norm": 1.0}

    def reset_optimizers(self) -> None:
        self.num_resets += 1


def silent(done: int, total: int, loss: float) -> None:
    """Nobody listens."""


def test_a_warm_start_lowers_the_loss():
    """On the real learner, to less than half, and the optimizers start RL afresh."""
    torch.set_num_threads(1)
    learner = TokenLearner(PolicyModel(MODEL, seed=1), LearnerConfig())
    losses: list[float] = []
    start = warm_start(clean_steps=20, sloppy_steps=0, muon_lr=0.03, adamw_lr=0.01)
    metrics = start(learner, lambda done, total, loss: losses.append(loss))
    assert losses[-1] < 0.5 * losses[0] and metrics["loss"] == losses[-1]
    assert np.isfinite(metrics["grad_norm"])
    assert not learner.muon.state and not learner.adamw.state
    rates = LearnerConfig().optim
    assert {group["lr"] for group in learner.muon.param_groups} == {rates.muon_lr}
    assert {group["lr"] for group in learner.adamw.param_groups} == {rates.adamw_lr}


def test_two_warm_starts_give_the_same_weights():
    """A pure function of config, tasks and seed."""
    torch.set_num_threads(1)
    results = []
    for _ in range(2):
        learner = TokenLearner(PolicyModel(MODEL, seed=1), LearnerConfig())
        warm_start(clean_steps=3, sloppy_steps=3)(learner, silent)
        results.append(learner.weights())
    assert all(np.array_equal(results[0][name], results[1][name]) for name in results[0])


def test_another_seed_is_another_course():
    """Instances, habits and batches all hang on it."""
    courses = []
    for seed in (1, 1, 2):
        pupil = Pupil()
        warm_start(seed, clean_steps=2, sloppy_steps=2)(pupil, silent)
        courses.append(pupil.batches)
    assert courses[0] == courses[1] and courses[0] != courses[2]


def test_every_step_is_reported():
    """(done, total, loss), done from 1."""
    heard: list[tuple[int, int, float]] = []
    warm_start(clean_steps=2, sloppy_steps=1)(Pupil(), lambda *step: heard.append(step))
    assert heard == [(1, 3, 1.0), (2, 3, 0.5), (3, 3, 1.0 / 3)]


@pytest.mark.parametrize(("early", "late"), [(0.0, 1.0), (1.0, 0.0)])
def test_the_shares_say_which_transcripts_each_part_sees(early: float, late: float):
    """``early_sloppy_share`` in the first part, ``sloppy_share`` in the second."""
    start = warm_start(
        clean_steps=3, sloppy_steps=3, early_sloppy_share=early, sloppy_share=late, filler=1.0
    )
    clean, rough = ({s.token_ids.tobytes() for s in part} for part in start.demonstrations())
    assert not clean & rough, "a filler in each sloppy one keeps them apart"
    pupil = Pupil()
    start(pupil, silent)
    seen = [clean if share == 0.0 else rough for share in [early] * 3 + [late] * 3]
    assert all(set(batch) <= part for batch, part in zip(pupil.batches, seen, strict=True))
    assert all(len(batch) == 8 for batch in pupil.batches) and pupil.num_resets == 1


def test_each_part_decays_to_nothing_over_its_tail():
    """4 clean steps with decay over the last half, then 2 sloppy ones at half the rate."""
    pupil = Pupil()
    warm_start(
        clean_steps=4,
        sloppy_steps=2,
        decay_share=0.5,
        sloppy_rate=0.5,
        muon_lr=1.0,
        adamw_lr=0.1,
    )(pupil, silent)
    scales = [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    assert pupil.rates == [pytest.approx((scale, 0.1 * scale)) for scale in scales]


def test_without_decay_the_rate_is_constant():
    """decay_share = 0 divides by nothing."""
    pupil = Pupil()
    warm_start(clean_steps=3, sloppy_steps=0, decay_share=0.0, muon_lr=1.0)(pupil, silent)
    assert [muon for muon, _ in pupil.rates] == [1.0, 1.0, 1.0]


def test_demonstrations_come_in_pairs_of_the_same_instance():
    """Clean and sloppy transcripts share their prompt; clean ones are the leanest of all."""
    clean, rough = warm_start(filler=1.0, redundant=1.0, guess=0.0).demonstrations()
    assert len(clean) == len(rough) == 8
    for a, b in zip(clean, rough, strict=True):
        first = int(a.loss_mask.argmax())
        assert a.key == b.key and b.loss_mask.argmax() == first
        assert np.array_equal(a.token_ids[:first], b.token_ids[:first])
        assert a.loss_mask.sum() < b.loss_mask.sum()
    assert lean_tokens(clean) == min(int(s.loss_mask.sum()) for s in clean) < lean_tokens(rough)


def test_writing_ahead_gives_the_same_demonstrations():
    """A thread writes what a call would have written, and tells how far it is."""
    told: list[tuple[int, int]] = []
    ahead = warm_start()
    ahead.write_ahead(lambda done, total: told.append((done, total)))
    first, second = Pupil(), Pupil()
    ahead(first, silent)
    warm_start()(second, silent)
    assert first.batches == second.batches
    assert told == [(done, 8) for done in range(1, 9)]


def test_an_error_in_the_writing_thread_reaches_the_caller():
    """Not a warm start on nothing, and not a wait for ever."""
    start = warm_start(num_demonstrations=2)

    def fail(done: int, total: int) -> None:
        raise RuntimeError("no space left")

    start.write_ahead(fail)
    with pytest.raises(RuntimeError, match="no space left"):
        start(Pupil(), silent)
