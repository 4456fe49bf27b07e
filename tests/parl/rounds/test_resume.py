"""A run that is killed anywhere and resumed ends with the bits of one that was left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from parl.errors import CheckpointError, RoundError
from parl.rounds.machine import TRAIN
from tests.parl.rounds.conftest import Calm
from tests.parl.rounds.world import Killed, Run, copy_run, facts, tiny_config

KILLS = [
    # (rounds done before, part, method, when, nth call)
    pytest.param(2, "store", "begin_round", "after", 1, id="begun"),
    pytest.param(3, "store", "issue", "after", 1, id="issued"),
    pytest.param(3, "store", "finish", "before", 1, id="no-episode-finished"),
    pytest.param(2, "store", "finish", "after", 5, id="some-episodes-finished"),
    pytest.param(3, "collector", "collect", "after", 1, id="collected"),
    pytest.param(3, "store", "score", "after", 1, id="scored"),
    pytest.param(1, "learner", "update", "after", 1, id="updated"),
    pytest.param(3, "learner", "save", "after", 1, id="half-a-checkpoint"),
    pytest.param(3, "weights", "publish", "before", 1, id="checkpoint-written"),
    pytest.param(3, "weights", "publish", "after", 1, id="weights-written"),
    pytest.param(1, "store", "commit_round", "after", 1, id="checkpoint-committed"),
    pytest.param(2, "store", "commit_round", "after", 1, id="committed-without-checkpoint"),
    pytest.param(2, "collector", "publish", "after", 1, id="published"),
]


def assert_same_run(run: Run, calm: Calm) -> None:
    """Compare section by section: a difference then names itself."""
    found = facts(run)
    for section, expected in calm.facts.items():
        assert found[section] == expected, section
    audit = run.store.audit()
    assert audit.ok, audit


def die(folder: Path, *kills: tuple[str, str, str, int]) -> None:
    """One process's life: restore, then step until the kill."""
    with Run.open(folder) as run:
        for kill in kills:
            run.kill(*kill)
        with pytest.raises(Killed):
            run.finish()


def test_the_undisturbed_run_learns_something(calm: Calm):
    """Otherwise equal bits would say nothing: rewards differ and weights move."""
    rounds = [calm.facts["rounds"][f"train-{index}"] for index in range(4)]
    assert sum(row["metrics"]["grad_norm"] > 0 for row in rounds) >= 3
    assert len({row["weights"] for row in rounds}) >= 3
    assert [row["checkpoint"] is not None for row in rounds] == [False, True, False, True]
    assert len({reward for _, _, reward, _, _ in calm.facts["rewards"]}) > 1
    assert any(len(episode) > 4 for episode in calm.facts["tokens"].values()), "tools are called"


@pytest.mark.parametrize(("done", "part", "method", "when", "nth"), KILLS)
def test_a_killed_round_ends_with_the_same_bits(
    calm: Calm,
    resume_from: Callable[[int], Path],
    done: int,
    part: str,
    method: str,
    when: str,
    nth: int,
):
    """Rewards, losses, gradient norms, weights and checkpoints of this and later rounds."""
    folder = resume_from(done)
    die(folder, (part, method, when, nth))
    with Run.open(folder) as run:
        run.finish()
        assert_same_run(run, calm)


def test_a_round_may_be_killed_again_and_again(calm: Calm, resume_from: Callable[[int], Path]):
    """Each life gets a little further; what was finished is never sampled twice."""
    folder = resume_from(2)
    die(folder, ("store", "finish", "after", 3))
    die(folder, ("store", "finish", "after", 6))
    die(folder, ("learner", "update", "after", 1))
    die(folder, ("store", "commit_round", "before", 1))
    with Run.open(folder) as run:
        run.finish()
        assert_same_run(run, calm)
        reissued = run.store.events("episode_reissued")
        assert len(reissued) <= 2 * 12 - 9


def test_a_finished_run_stays_as_it_is(calm: Calm, resume_from: Callable[[int], Path]):
    """Restore of a complete run has nothing left to do."""
    with Run.open(resume_from(4)) as run:
        assert run.machine.finished and run.machine.weight_version == 4
        assert_same_run(run, calm)


def test_restore_may_be_called_again(calm: Calm, resume_from: Callable[[int], Path]):
    """A second restore forgets what the first one folded, and an unfinished step."""
    with Run.open(resume_from(3)) as run:
        run.machine.restore()
        assert (run.machine.next_round, run.machine.weight_version) == (3, 3)
        run.finish()
        assert_same_run(run, calm)


def test_failed_episodes_run_again(calm: Calm, resume_from: Callable[[int], Path]):
    """The infrastructure breaks for one prompt, the round stops; resumed, it loses no bit."""
    folder = resume_from(2)
    with Run.open(folder) as run:
        run.collector.broken = "no disk"
        with pytest.raises(RoundError, match=r"4 episodes failed.*no disk"):
            run.machine.step()
    with Run.open(folder) as run:
        run.finish()
        assert len(run.store.events("episode_reopened")) == 4
        assert_same_run(run, calm)


def test_replay_that_comes_out_differently_is_refused(resume_from: Callable[[int], Path]):
    """A changed learner cannot pretend to be the one that made the committed weights."""
    config = tiny_config()
    optim = config.learner.optim.model_copy(update={"momentum": 0.5})
    learner = config.learner.model_copy(update={"optim": optim})
    changed = config.model_copy(update={"learner": learner})
    # rounds 0 and 1 are in the checkpoint, round 2 is replayed
    with pytest.raises(CheckpointError, match="restored weights of version 3 have checksum"):
        Run.open(resume_from(3), changed)


def damage(folder: Path, name: str) -> None:
    with (folder / "checkpoints" / name / "learner.json").open("a") as file:
        file.write(" ")


def test_a_damaged_checkpoint_costs_a_replay(calm: Calm, resume_from: Callable[[int], Path]):
    """The one before it and the ledger hold the same run, to the bit."""
    folder = resume_from(2)
    damage(folder, "train-00001")
    with Run.open(folder) as run:
        assert (run.machine.next_round, run.machine.weight_version) == (2, 2)
        run.finish()
        assert_same_run(run, calm)


def test_a_missing_checkpoint_costs_a_replay(
    calm: Calm, resume_from: Callable[[int], Path], tmp_path: Path
):
    """As a damaged one."""
    folder = resume_from(2)
    (folder / "checkpoints" / "train-00001").rename(tmp_path / "elsewhere")
    with Run.open(folder) as run:
        run.finish()
        assert_same_run(run, calm)


def test_no_whole_checkpoint_is_refused(resume_from: Callable[[int], Path], tmp_path: Path):
    """Nothing is built on files that changed after their commit; the newest is named."""
    folder = resume_from(2)
    damage(folder, "train-00001")
    damage(folder, "sft-00000")
    with pytest.raises(CheckpointError, match=r"train-00001.*files were changed after the commit"):
        Run.open(folder)
    (folder / "checkpoints" / "train-00001").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="train-00001 is missing"):
        Run.open(folder)


def test_a_moved_run_keeps_its_checkpoints(resume_from: Callable[[int], Path], tmp_path: Path):
    """The ledger holds the old paths; names count."""
    folder = resume_from(2)
    moved = copy_run(folder, tmp_path / "moved")
    with Run.open(moved) as run:
        assert run.machine.next_round == 2
        assert sorted(p.name for p in (moved / "checkpoints").iterdir()) == [
            "sft-00000",
            "train-00001",
        ]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_nan_commits_nothing(calm: Calm, resume_from: Callable[[int], Path], name: str):
    """RoundError, and the next process goes on from intact weights as if nothing had been."""
    folder = resume_from(2)
    with Run.open(folder) as run:
        update = run.learner.update

        def ruined(*args, **kwargs):
            return {**update(*args, **kwargs), name: float("nan")}

        run.learner.update = ruined
        with pytest.raises(RoundError, match=rf"{name}=nan.*nothing was committed"):
            run.machine.step()
        assert not run.store.is_committed(TRAIN, 2)
        assert [row.weight_version_out for row in run.store.committed_rounds()] == [0, 1, 2]
    with Run.open(folder) as run:
        run.machine.step()
        assert facts(run)["rounds"]["train-2"] == calm.facts["rounds"]["train-2"]
