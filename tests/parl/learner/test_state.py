"""Saving and restoring a learner: exact or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine.model.model import PolicyModel
from parl.errors import CheckpointError
from parl.learner.config import LearnerConfig
from parl.learner.learner import TokenLearner
from parl.learner.state import META, OPTIMIZER, WEIGHTS
from tests.parl.learner.tiny import MODEL, make_advantages, make_learner, make_model, make_samples

SAMPLES = make_samples(make_model())
GAINS = make_advantages(12)


def saved(learner: TokenLearner, folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    learner.save(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_update_after_restore_is_the_undisturbed_update(tmp_path: Path):
    """Two steps, save, two more steps; a fresh learner restored from it takes the same two: equal
    to the bit in parameters and both optimizers."""
    straight = make_learner(router_bias_rate=0.01)
    for _ in range(2):
        straight.update(SAMPLES, GAINS)
    saved(straight, tmp_path / "middle")
    resumed = TokenLearner(PolicyModel(MODEL, 77), straight.config)
    resumed.restore(tmp_path / "middle")
    for learner in (straight, resumed):
        for _ in range(2):
            learner.update(SAMPLES, GAINS)
    assert saved(straight, tmp_path / "one") == saved(resumed, tmp_path / "two")
    assert resumed.num_updates == 4


def test_restore_undoes_what_came_after(tmp_path: Path):
    """The same learner goes back, momentum and rates included."""
    learner = make_learner()
    learner.sft_update(SAMPLES, 0.02, 0.01)
    before = saved(learner, tmp_path / "before")
    learner.reset_optimizers()
    learner.update(SAMPLES, GAINS)
    learner.restore(tmp_path / "before")
    assert saved(learner, tmp_path / "after") == before


def test_a_fresh_learner_can_be_saved(tmp_path: Path):
    """No optimizer state yet is a state too."""
    learner = make_learner()
    first = saved(learner, tmp_path / "a")
    learner.update(SAMPLES, GAINS)
    learner.restore(tmp_path / "a")
    assert saved(learner, tmp_path / "b") == first


def test_reset_forgets_momentum_and_rates():
    """After a reset the next step is that of a learner which only has the parameters."""
    learner = make_learner()
    learner.sft_update(SAMPLES, 0.02, 0.01)
    fresh = TokenLearner(make_model(), LearnerConfig())
    fresh.model.load_state_dict(learner.model.state_dict())
    learner.reset_optimizers()
    for one in (learner, fresh):
        one.update(SAMPLES, GAINS)
    mine, other = learner.weights(), fresh.weights()
    assert all(np.array_equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER])
def test_a_flipped_bit_is_refused_and_changes_nothing(name: str, tmp_path: Path):
    """A damaged file is named in one line; the learner stays as it was."""
    learner = make_learner()
    learner.update(SAMPLES, GAINS)
    data = bytearray(saved(learner, tmp_path / "bad")[name])
    data[-5] ^= 1
    (tmp_path / "bad" / name).write_bytes(data)
    before = saved(learner, tmp_path / "before")
    with pytest.raises(CheckpointError, match=f"{name} has sha256") as caught:
        learner.restore(tmp_path / "bad")
    assert "\n" not in str(caught.value)
    assert saved(learner, tmp_path / "after") == before


@pytest.mark.parametrize("name", [META, WEIGHTS, OPTIMIZER])
def test_a_missing_file_is_named(name: str, tmp_path: Path):
    """Half a checkpoint is none."""
    learner = make_learner()
    saved(learner, tmp_path / "half")
    (tmp_path / "half" / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read \\(No such file") as caught:
        learner.restore(tmp_path / "half")
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "cannot be read"),
        ("[]", "format list"),
        ('{"format": 1}', "format 1, this code reads 2"),
        ('{"format": 2}', "lacks num_updates"),
    ],
)
def test_a_meta_file_that_makes_no_sense_is_refused(text: str, complaint: str, tmp_path: Path):
    """Broken JSON, another type, another format, half the keys: one line each."""
    learner = make_learner()
    saved(learner, tmp_path / "odd")
    (tmp_path / "odd" / META).write_text(text)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        learner.restore(tmp_path / "odd")
    assert "\n" not in str(caught.value)


def test_another_model_is_refused_by_its_difference(tmp_path: Path):
    """The first field that differs is named with both values."""
    learner = make_learner()
    saved(learner, tmp_path / "mine")
    other = TokenLearner(
        PolicyModel(MODEL.model_copy(update={"hidden_size": 32}), 0), learner.config
    )
    with pytest.raises(CheckpointError, match="hidden_size is 16, this run has 32"):
        other.restore(tmp_path / "mine")


def test_the_meta_file_is_plain_json(tmp_path: Path):
    """Readable without this code: counters, rates, model and checksums."""
    learner = make_learner()
    learner.update(SAMPLES, GAINS)
    meta = json.loads(saved(learner, tmp_path / "x")[META])
    assert meta["num_updates"] == 1 and meta["rates"] == [3e-3, 3e-4]
    assert set(meta["sha256"]) == {WEIGHTS, OPTIMIZER}
