"""Warm start, evaluation and the experiment around them: each phase happens once, however often."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from parl.errors import RoundError
from parl.rounds.experiment import run_experiment
from parl.rounds.machine import WARM_START
from parl.rounds.reports import EvalReport, RoundReport, RunSummary
from parl.store.store import Store
from reward_models.episode import Outcome
from tests.parl.rounds.world import Killed, Run, tiny_config

SHORT = {
    "rounds": {"num_rounds": 2, "eval_episodes": 4, "checkpoint_every": 2},
    "warm_start": {"sloppy_steps": 3, "num_demonstrations": 4},
}


class Diary:
    """A Progress that writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.summary: RunSummary | None = None

    def phase_started(self, name: str) -> None:
        self.lines.append(name)

    def warm_step(self, done: int, total: int, loss: float) -> None:
        self.lines.append(f"step {done}/{total}")

    def round_done(self, report: RoundReport) -> None:
        self.lines.append(f"round {report.index + 1}/{report.num_rounds}")

    def eval_done(self, report: EvalReport) -> None:
        self.lines.append(f"eval {report.name} v{report.weight_version}")

    def finished(self, summary: RunSummary) -> None:
        self.summary = summary


def experiment(run: Run, diary: Diary) -> RunSummary:
    return run_experiment(
        run.machine,
        warm_start=lambda learner, report: run.parts.warm_start()(learner, report),
        step=run.machine.step,
        progress=diary,
        run_dir=str(run.folder),
    )


def checksums(store: Store) -> list[str]:
    return [store.weight_checksum(row.weight_version_out or 0) for row in store.committed_rounds()]


PHASES = ["warm start", "eval before", "rounds", "eval after"]
STEPS = ["step 1/3", "step 2/3", "step 3/3"]


def test_an_experiment_goes_through_its_phases_once(tmp_path: Path):
    """In order the first time; the second time everything comes out of the ledger."""
    config = tiny_config(**SHORT)
    first, second = Diary(), Diary()
    with Run.open(tmp_path, config) as run:
        summary = experiment(run, first)
        assert run.store.load_run().status == "finished"
    evals = ["eval before v0", "eval after v2"]
    assert first.lines == [
        *("warm start", *STEPS, "eval before", evals[0]),
        *("rounds", "round 1/2", "round 2/2", "eval after", evals[1]),
    ]
    with Run.open(tmp_path, config) as run:
        for part, method in (("collector", "collect"), ("learner", "update")):
            run.kill(part, method, "before")
        run.kill("learner", "sft_update", "before")
        again = experiment(run, second)
        assert run.store.audit().ok
    assert second.lines == [*PHASES[:2], evals[0], "rounds", "eval after", evals[1]]
    assert (again.before, again.after) == (summary.before, summary.after)
    assert summary.before and summary.before.episodes == 4 and summary.num_rounds == 2
    assert again == second.summary and again.run_dir == str(tmp_path)


def test_an_experiment_killed_in_every_phase_ends_like_a_calm_one(tmp_path: Path):
    """Each life does what is left and reports only that."""
    config = tiny_config(**SHORT)
    (tmp_path / "calm").mkdir()
    with Run.open(tmp_path / "calm", config) as run:
        calm, expected = experiment(run, Diary()), checksums(run.store)
    folder = tmp_path / "killed"
    folder.mkdir()
    diary = Diary()
    for kill in [
        ("learner", "sft_update", "after", 2),
        ("store", "finish", "after", 2),  # while it evaluates
        ("store", "commit_eval", "before", 1),
        ("store", "finish", "after", 5),  # in round 0
        ("collector", "publish", "before", 3),  # after the commit of round 1
    ]:
        with Run.open(folder, config) as run:
            run.kill(*kill)
            with pytest.raises(Killed):
                experiment(run, Diary())
    with Run.open(folder, config) as run:
        summary = experiment(run, diary)
        assert checksums(run.store) == expected
        assert run.store.audit().ok
    assert (summary.before, summary.after) == (calm.before, calm.after)
    assert not [line for line in diary.lines if line.startswith("step")]


def test_no_evaluation_when_none_is_asked_for(tmp_path: Path):
    """eval_episodes = 0."""
    config = tiny_config(**{**SHORT, "rounds": {"num_rounds": 0, "eval_episodes": 0}})
    diary = Diary()
    with Run.open(tmp_path, config) as run:
        summary = experiment(run, diary)
    assert diary.lines == ["warm start", *STEPS, "rounds"]
    assert summary.before is None and summary.after is None


@pytest.fixture(scope="module")
def calm_start(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Checksums after a warm start nobody disturbed."""
    with Run.open(tmp_path_factory.mktemp("calm-start"), tiny_config(**SHORT)) as run:
        run.warm_start()
        return checksums(run.store)


@pytest.mark.parametrize(
    "kill",
    [
        ("learner", "sft_update", "after", 2),
        ("learner", "save", "after", 1),
        ("store", "commit_round", "before", 1),
        ("store", "commit_round", "after", 1),
        ("collector", "publish", "before", 1),
    ],
    ids=["step", "checkpoint", "before-commit", "after-commit", "publish"],
)
def test_a_killed_warm_start_gives_the_same_weights(tmp_path: Path, calm_start: list[str], kill):
    """Version 0 is a function of config and seed; once committed it is never trained again."""
    config = tiny_config(**SHORT)
    with Run.open(tmp_path, config) as run:
        run.kill(*kill)
        with pytest.raises(Killed):
            run.warm_start()
    with Run.open(tmp_path, config) as run:
        run.warm_start()
        run.kill("learner", "sft_update", "before")
        run.warm_start()
        assert checksums(run.store) == calm_start
        assert (run.machine.weight_version, run.machine.next_round) == (0, 0)


def test_a_warm_start_that_ends_in_nan_commits_nothing(tmp_path: Path):
    """RoundError names the section to change."""
    with Run.open(tmp_path, tiny_config(**SHORT)) as run:
        with pytest.raises(RoundError, match=r"loss=nan.*lower rates in \[warm_start\]"):
            run.machine.warm_start(lambda learner: {"loss": float("nan"), "grad_norm": 1.0})
        assert not run.store.is_committed(WARM_START, 0) and run.machine.weight_version == -1


def test_a_warm_start_without_steps_commits_the_initial_weights(tmp_path: Path):
    """Version 0 has to exist: the engines serve nothing before."""
    config = tiny_config(**{**SHORT, "warm_start": {"sloppy_steps": 0, "num_demonstrations": 2}})
    with Run.open(tmp_path, config) as run:
        before = run.learner.weights()
        run.warm_start()
        assert run.machine.weight_version == 0
        after = run.weights.fetch(0).tensors
        assert all((after[name] == tensor).all() for name, tensor in before.items())


def test_an_evaluation_resumes_and_is_done_once(resume_from: Callable[[int], Path]):
    """Killed half way it goes on; committed it comes from the ledger, whatever is served now."""
    folder = resume_from(1)
    with Run.open(folder) as run:
        run.kill("store", "finish", "after", 2)
        with pytest.raises(Killed):
            run.machine.evaluate("mid")
    with Run.open(folder) as run:
        assert run.store.counts("eval:mid")["finished"] == 2
        report = run.machine.evaluate("mid")
        run.machine.step()
        run.kill("collector", "collect", "before")
        assert run.machine.weight_version == 2
        assert run.machine.evaluate("mid") == report
        with pytest.raises(Killed):
            run.machine.evaluate("other")
        assert run.store.audit().ok
    assert (report.episodes, report.weight_version, report.name) == (4, 1, "mid")
    assert sum(report.outcomes.values()) == 4


def test_evaluations_are_paired_and_leave_training_alone(calm, resume_from):
    """The same tasks and draws under another name; the next round's bits do not notice."""
    with Run.open(resume_from(1)) as run:
        a, b = run.machine.evaluate("a"), run.machine.evaluate("b")
        assert (a.success, a.mean_tokens, a.outcomes) == (b.success, b.mean_tokens, b.outcomes)
        ids = [
            [t.token_ids().tolist() for t in run.store.load_trajectories(f"eval:{name}", 0)]
            for name in "ab"
        ]
        assert ids[0] == ids[1]
        run.machine.step()
        committed = run.store.committed_rounds()[-1]
        assert committed.checkpoint_hash == calm.facts["rounds"]["train-1"]["checkpoint"]


def test_a_round_nobody_can_score_is_an_error(resume_from: Callable[[int], Path]):
    """All episodes end by the environment's fault: RoundError with the outcomes, no commit."""
    with Run.open(resume_from(1)) as run:
        load = run.store.load_trajectories

        def unscored(phase: str, index: int):
            rows = load(phase, index)
            for row in rows:
                row.outcome, row.correctness = Outcome.ENV_ERROR, None
            return rows

        run.store.load_trajectories = unscored
        with pytest.raises(RoundError, match=r"none of 12 episodes has a reward.*env_error"):
            run.machine.step()
        assert not run.store.is_committed("train", 1)
