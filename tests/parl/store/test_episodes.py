"""An episode's way through the ledger: issue, run, finish, score, commit; and what is refused."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parl.errors import RunError
from parl.store import Store
from reward_models.episode import Outcome
from tests.parl.store.builders import (
    assert_same_trajectory,
    make_job,
    make_trajectory,
    reward,
    trajectories,
)

ONE_LEDGER = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def finished(store: Store, *jobs):
    store.issue(jobs)
    for job in jobs:
        store.mark_running(job.episode_id, "w0")
        store.finish(make_trajectory(job))


def test_issue_returns_what_is_still_to_run(store: Store):
    """Issuing again leaves out finished episodes and keeps the given order."""
    jobs = [make_job(task, sample) for task in range(2) for sample in range(2)]
    assert store.issue(jobs) == jobs
    store.mark_running(jobs[1].episode_id, "w0")
    store.mark_running(jobs[2].episode_id, "w0")
    store.finish(make_trajectory(jobs[2]))
    assert store.issue(jobs) == [jobs[0], jobs[1], jobs[3]]
    assert store.counts() == {"finished": 1, "issued": 2, "running": 1}


def test_issue_refuses_another_draw(store: Store):
    """A resumed run with another seed would mix two random streams in one round."""
    store.issue([make_job()])
    with pytest.raises(RunError, match="must keep its seed"):
        store.issue([make_job(seed=4)])


def test_a_further_attempt_counts_and_leaves_an_event(store: Store):
    """running -> running is a re-issue after a lost worker."""
    job = make_job()
    store.issue([job])
    assert store.mark_running(job.episode_id, "w0") == 1
    assert store.mark_running(job.episode_id, "w1", "w0 died") == 2
    (event,) = store.events("episode_reissued")
    assert event.key == job.episode_id
    assert event.data == {"attempt": 2, "worker": "w1", "before": "w0", "reason": "w0 died"}
    assert store.audit().attempts == 1


def test_finish_twice_with_equal_content_changes_nothing(store: Store):
    """Two workers may run one episode; wall times differ, draws do not."""
    job = make_job()
    finished(store, job)
    slower = make_trajectory(job)
    slower.elapsed_s = 9.0
    slower.calls = [replace(slower.calls[0], elapsed_s=4.0)]
    store.finish(slower)
    (loaded,) = store.load_trajectories("train", 0)
    assert_same_trajectory(loaded, make_trajectory(job))


@pytest.mark.parametrize("what", ["turns", "correctness", "calls"])
def test_finish_twice_with_other_content_is_refused(store: Store, what: str):
    """The same draws gave another episode: that is a fault, not a choice."""
    job = make_job()
    finished(store, job)
    other = make_trajectory(job)
    if what == "turns":
        other.turns[1].sampled_ids[0] += 1
    elif what == "correctness":
        other.correctness = 0.0
    else:
        other.calls = [replace(other.calls[0], observation="6")]
    with pytest.raises(RunError, match=f"with other {what}"):
        store.finish(other)
    assert_same_trajectory(store.load_trajectories("train", 0)[0], make_trajectory(job))


def test_a_late_failure_does_not_touch_a_finished_episode(store: Store):
    """A worker that was given up on may still report that it failed."""
    job = make_job()
    finished(store, job)
    late = make_trajectory(job, Outcome.INFRA_ERROR)
    late.turns = []
    late.error = "box died"
    store.finish(late)
    assert store.load_trajectories("train", 0)[0].outcome is Outcome.COMPLETED
    assert store.events("late_failure_ignored")[0].data["error"] == "box died"


def test_a_failed_episode_can_be_reopened(store: Store):
    """Once the cause is repaired the episode runs again; its first failure stays on record."""
    jobs = [make_job(sample=0), make_job(sample=1)]
    store.issue(jobs)
    for job in jobs:
        store.mark_running(job.episode_id, "w0")
    failed = make_trajectory(jobs[0], Outcome.INFRA_ERROR)
    failed.error = "box died"
    store.finish(failed)
    store.finish(make_trajectory(jobs[1]))
    assert store.reopen_failed("train", 0) == [jobs[0].episode_id]
    assert store.issue(jobs) == [jobs[0]]
    assert store.events("episode_reopened")[0].data["error"] == "box died"
    store.mark_running(jobs[0].episode_id, "w0")
    store.finish(make_trajectory(jobs[0]))
    assert_same_trajectory(store.load_trajectories("train", 0)[0], make_trajectory(jobs[0]))


def test_trajectories_come_back_sorted(store: Store):
    """Batches are ordered by (task, sample), not by who was faster."""
    jobs = [make_job(1, 1), make_job(0, 2), make_job(1, 0), make_job(0, 0)]
    finished(store, *jobs)
    loaded = store.load_trajectories("train", 0)
    assert [(t.draw.task, t.draw.sample) for t in loaded] == [(0, 0), (0, 2), (1, 0), (1, 1)]
    assert store.load_trajectories("train", 1) == []


@ONE_LEDGER
@given(trajectories())
def test_any_trajectory_comes_back_bit_for_bit(store: Store, trajectory):
    """NaN payloads, empty arrays, NUL and lone surrogates survive the ledger."""
    number = sum(store.counts().values())
    job = make_job(task_index=number, round_index=number)
    store.issue([job])
    store.mark_running(job.episode_id, "w0")
    # the ledger knows name, type and draw from the job
    trajectory = replace(trajectory, episode_id=job.episode_id, draw=job.draw)
    store.finish(trajectory)
    (loaded,) = store.load_trajectories("train", number)
    assert_same_trajectory(loaded, trajectory)
    assert all(turn.sampled_ids.flags.writeable for turn in loaded.turns)
    store.finish(trajectory)  # and is recognised as equal


OPERATIONS = ["issue", "run", "finish", "score", "drop"]
NEXT = {
    "none": {"issue": "issued"},
    "issued": {"issue": "issued", "run": "running", "drop": "dropped"},
    "running": {"issue": "running", "run": "running", "finish": "finished", "drop": "dropped"},
    "finished": {"issue": "finished", "finish": "finished", "score": "scored", "drop": "dropped"},
    "scored": {"issue": "scored", "finish": "scored", "score": "scored", "drop": "dropped"},
    "dropped": {"issue": "dropped", "drop": "dropped"},
}


@ONE_LEDGER
@given(st.lists(st.sampled_from(OPERATIONS), max_size=12))
def test_only_legal_transitions_happen(store: Store, operations):
    """Whatever order things are tried in, the state is what the table says; a refusal changes
    nothing."""
    number = sum(store.counts().values())
    job = make_job(task_index=number, round_index=number)
    state, was_finished = "none", False
    apply = {
        "issue": lambda: store.issue([job]),
        "run": lambda: store.mark_running(job.episode_id, "w0"),
        "finish": lambda: store.finish(make_trajectory(job)),
        "score": lambda: store.score([(job.episode_id, reward())]),
        "drop": lambda: store.drop({job.episode_id: "test"}),
    }
    for operation in operations:
        allowed = dict(NEXT[state])
        if state == "dropped" and was_finished:
            allowed["finish"] = "dropped"  # equal content again: nothing to do
        if operation in allowed:
            apply[operation]()
            state = allowed[operation]
            was_finished = was_finished or state == "finished"
        else:
            with pytest.raises(RunError):
                apply[operation]()
        found = store.counts("train", number)
        assert found == ({} if state == "none" else {state: 1})


def test_score_is_one_transaction(store: Store):
    """One bad episode and nothing is scored."""
    good, bad = make_job(sample=0), make_job(sample=1)
    finished(store, good)
    store.issue([bad])
    with pytest.raises(RunError, match="cannot become 'scored'"):
        store.score([(good.episode_id, reward()), (bad.episode_id, reward())])
    assert store.counts() == {"finished": 1, "issued": 1}
    assert store.show(good.episode_id).reward is None


def test_show_tells_everything(store: Store):
    """Task, attempts, tokens, reward and events of one episode."""
    job = make_job()
    finished(store, job)
    store.score([(job.episode_id, reward(0.75))], stage=1)
    store.score([(job.episode_id, reward(1.0))], stage=1)  # again before the commit: replaced
    view = store.show(job.episode_id)
    assert view.state == "scored" and view.attempt == 1 and view.worker == "w0" and view.stage == 1
    assert view.reward == reward(1.0)
    assert view.task_spec["instruction"] == job.task.instruction
    assert view.trajectory is not None
    assert_same_trajectory(view.trajectory, make_trajectory(job))
    with pytest.raises(RunError, match="not in the ledger"):
        store.show("nope")


def test_an_unscored_outcome_is_scored_with_none(store: Store):
    """No reward is not the reward 0."""
    job = make_job()
    store.issue([job])
    store.mark_running(job.episode_id, "w0")
    store.finish(make_trajectory(job, Outcome.VERIFIER_ERROR))
    store.score([(job.episode_id, reward(None))])
    view = store.show(job.episode_id)
    assert view.reward is not None and view.reward.total is None


def test_the_store_travels_to_a_worker(store: Store):
    """Pickled as the ledger's URL, it writes the same ledger."""
    job = make_job()
    store.issue([job])
    copy = pickle.loads(pickle.dumps(store))
    copy.mark_running(job.episode_id, "w1")
    assert store.counts() == {"running": 1}
    copy._ledger.close()


def test_jobs_and_trajectories_pickle():
    """They cross processes."""
    job = make_job()
    assert pickle.loads(pickle.dumps(job)) == job
    trajectory = make_trajectory(job)
    assert_same_trajectory(pickle.loads(pickle.dumps(trajectory)), trajectory)
    assert np.array_equal(trajectory.token_ids(), [1, 2, 3, 5, 6, 9, 7, 8])
