"""Other shapes of a run: several learners and engines, deadlines, a driver that comes back."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from parl.errors import RoundError
from parl.learner.learner import TokenLearner
from parl.rllib.build import RayRun
from tests.ray.conftest import small_config, warm

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


def test_two_learners_make_the_update_of_one(build: Callable[..., RayRun], tmp_path: Path) -> None:
    """Shards by tokens, one global norm: loss and gradient agree with one learner to float32
    rounding, the step to that of Muon's bfloat16 iteration; both ranks hold the same bits, and a
    checkpoint restores both."""
    config = small_config("ray.num_learners=2", "ray.num_runners=1", "rounds.num_rounds=1")
    run = build(config, tmp_path / "two")
    warm(config, run.machine)
    run.step()
    port = run.machine._learner
    port.save(_new(tmp_path / "saved"))
    alone = _alone(config)
    alone.restore(tmp_path / "saved")
    samples = [
        t.to_training_sample()
        for t in run.machine.store.load_trajectories("train", 0)
        if t.turns and t.correctness is not None
    ]
    before = alone.weights()
    advantages = [0.5 if i % 3 else -1.0 for i in range(len(samples))]
    found, expected = port.update(samples, advantages), alone.update(samples, advantages)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-7)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    after = port.weights()
    for name, value in alone.weights().items():
        step = np.linalg.norm(value - before[name])
        assert np.linalg.norm(after[name] - value) <= 0.02 * step, name
    ranks = [r.get() for r in port._group.foreach_learner(_weights)]
    assert len(ranks) == 2
    assert all(np.array_equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
    port.restore(tmp_path / "saved")
    alone.restore(tmp_path / "saved")
    for name, value in alone.weights().items():
        assert np.array_equal(port.weights()[name], value), name
    run.close()  # its CPUs are needed below


def test_two_engines_and_a_driver_that_comes_back(
    build: Callable[..., RayRun], tmp_path: Path
) -> None:
    """Groups spread over engines by task; a second PARL goes on where the ledger says, with the
    committed weights, and a deadline that passes is one line."""
    config = small_config("ray.num_engines=2", "ray.num_runners=1", "rounds.num_rounds=2")
    first = build(config, tmp_path)
    warm(config, first.machine)
    first.step()
    version = first.machine.weight_version
    weights = first.machine._learner.weights()
    first.algorithm.stop()

    second = build(config, tmp_path)
    machine = second.machine
    machine.restore()
    assert (machine.weight_version, machine.next_round) == (version, 1)
    again = machine._learner.weights()
    assert all(np.array_equal(weights[name], again[name]) for name in weights)
    groups = machine._jobs.train_groups(1, machine._tasks.train(1), version, 0, lambda task: None)
    machine.store.begin_round("train", 1, stage=0, weight_version_in=version)
    machine.store.issue([job for group in groups for job in group.jobs])
    with pytest.raises(RoundError, match="the round is not collected after 0 s"):
        machine._collector.collect(groups, 0.0)
    assert second.step().index == 1


def _alone(config) -> TokenLearner:
    from engine.model.model import PolicyModel

    return TokenLearner(PolicyModel(config.model, config.run.seed), config.learner)


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _weights(learner):
    return learner.policy_weights()
