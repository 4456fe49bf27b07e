"""Rounds, their one commit, and what the audit finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infra.db.engine import Ledger
from infra.db.models import EpisodeRow
from parl.errors import RunError
from parl.store import LedgerEvent, RoundCommit, Store, TypeStats
from tests.parl.store.builders import make_job, make_trajectory, reward

STATS = TypeStats("lookup", 2, 2, 1, 4.0, 8.0, True, {"a": 1.5})
COMMIT = RoundCommit(
    phase="train",
    index=0,
    weight_version=1,
    weight_checksum="abc",
    weight_path="weights/v1",
    checkpoint_path="checkpoints/train-00000",
    checkpoint_hash="def",
    metrics={"loss": 0.1 + 0.2, "grad_norm": 1e-300},
    dropped={make_job(sample=1).episode_id: "no reward"},
    type_stats=[STATS],
    events=[LedgerEvent("gate", 0, "lookup", {"open": True})],
)


def scored_round(store: Store, num_samples: int = 3):
    jobs = [make_job(sample=sample) for sample in range(num_samples)]
    store.begin_round("train", 0, stage=0, weight_version_in=0)
    store.issue(jobs)
    for job in jobs:
        store.mark_running(job.episode_id, "w0")
        store.finish(make_trajectory(job))
    store.score([(job.episode_id, reward()) for job in jobs], stage=0)
    return jobs


def test_commit_writes_everything(store: Store):
    """Weights, checkpoint, metrics, statistics, events and the episodes' last state."""
    scored_round(store)
    store.commit_round(COMMIT)
    (row,) = store.committed_rounds()
    assert (row.status, row.weight_version_in, row.weight_version_out) == ("committed", 0, 1)
    assert (row.checkpoint_path, row.checkpoint_hash) == ("checkpoints/train-00000", "def")
    assert row.metrics == COMMIT.metrics
    assert store.last_committed_round() == row
    assert store.is_committed("train", 0) and not store.is_committed("train", 1)
    assert store.weight_checksum(1) == "abc"
    assert store.type_stats() == {0: [STATS]}
    (event,) = store.events("gate", key="lookup")
    assert event.data == {"open": True}
    assert store.counts() == {"dropped": 1, "trained": 2}
    assert store.show(make_job(sample=1).episode_id).drop_reason == "no reward"
    assert len(store.load_trajectories("train", 0)) == 3, "a replay needs the dropped ones too"
    assert store.audit().ok


def test_commit_again_is_a_no_op_and_another_one_is_refused(store: Store):
    """A commit whose answer was lost may be sent again; a different one may not."""
    scored_round(store)
    store.commit_round(COMMIT)
    store.commit_round(COMMIT)
    assert len(store.events("gate")) == 1
    with pytest.raises(RunError, match="a commit is final"):
        store.commit_round(replace(COMMIT, weight_checksum="xyz"))
    with pytest.raises(RunError, match="is committed; begin the next one"):
        store.begin_round("train", 0, stage=0, weight_version_in=0)


def test_commit_is_all_or_nothing(store: Store):
    """An episode that is not scored stops the commit and leaves no trace of it."""
    scored_round(store)
    extra = make_job(task_index=1)
    store.issue([extra])
    with pytest.raises(RunError, match="1 episodes that are neither scored nor dropped"):
        store.commit_round(COMMIT)
    assert store.committed_rounds() == []
    assert store.counts() == {"issued": 1, "scored": 3}
    assert store.events("gate") == [] and store.type_stats() == {}
    with pytest.raises(RunError, match="no weight version 1"):
        store.weight_checksum(1)


def test_a_round_left_open_is_found_again(store: Store):
    """The same start is accepted, other weights are not."""
    first = store.begin_round("train", 4, stage=1, weight_version_in=7)
    assert store.begin_round("train", 4, stage=1, weight_version_in=7) == first
    assert store.round_version("train", 4) == 7 and store.round_version("train", 5) is None
    with pytest.raises(RunError, match="restore the run"):
        store.begin_round("train", 4, stage=1, weight_version_in=8)


def test_round_status_only_goes_forward(store: Store):
    """A resumed round repeats its steps without undoing the record of later ones."""
    store.begin_round("train", 0, stage=0, weight_version_in=0)
    store.set_round_status("train", 0, "scored")
    store.set_round_status("train", 0, "collected")
    assert store.rounds("train")[0].status == "scored"
    with pytest.raises(RunError, match="committed by commit_round"):
        store.set_round_status("train", 0, "committed")
    with pytest.raises(RunError, match="never begun"):
        store.set_round_status("train", 9, "scored")


def test_an_evaluation_commits_without_weights(store: Store):
    """Its episodes stay finished and the audit agrees with that."""
    job = make_job(phase="eval:before")
    store.begin_round("eval:before", 0, stage=0, weight_version_in=0)
    store.issue([job])
    with pytest.raises(RunError, match="1 episodes that are not finished"):
        store.commit_eval("eval:before", 0, 0)
    store.mark_running(job.episode_id, "w0")
    store.finish(make_trajectory(job))
    store.commit_eval("eval:before", 0, 0, {"success": 0.5})
    store.commit_eval("eval:before", 0, 0)
    assert store.is_committed("eval:before", 0)
    assert store.rounds("eval:before")[0].metrics == {"weight_version": 0, "success": 0.5}
    assert store.committed_rounds() == [] and store.audit().ok


def test_committed_rounds_are_in_order_of_versions(store: Store):
    """Warm start first, then training rounds: the order a restore replays them in."""
    for phase, index, version in [("sft", 0, 0), ("train", 0, 1), ("train", 1, 2)]:
        store.begin_round(phase, index, stage=0, weight_version_in=version - 1)
        store.commit_round(
            replace(
                COMMIT,
                phase=phase,
                index=index,
                weight_version=version,
                dropped={},
                type_stats=[],
                events=[],
            )
        )
    assert [(r.phase, r.index) for r in store.committed_rounds()] == [
        ("sft", 0),
        ("train", 0),
        ("train", 1),
    ]
    last = store.last_committed_round()
    assert last is not None and last.index == 1


def test_events_are_ordered_by_place(store: Store):
    """A fold reads them in order of (round, task, sample), not of arrival."""
    places = [(1, None, None), (0, 1, 0), (0, 0, 1), (0, None, None), (0, 0, 0)]
    store.add_events([LedgerEvent("x", r, task_index=t, sample=s) for r, t, s in places])
    found = [(e.round_index, e.task_index, e.sample) for e in store.events("x")]
    assert found == [(0, None, None), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, None, None)]


def test_the_audit_finds_what_is_wrong(store: Store, ledger: Ledger):
    """A hole in the grid, a draw used twice, an episode that never ended."""
    jobs = [make_job(0, 0), make_job(0, 1), make_job(1, 1)]
    store.issue(jobs)
    assert store.audit().missing == ["run-1/train/00000/00001/000"]
    store.mark_running(jobs[0].episode_id, "w0")
    assert store.audit().stuck == []
    assert store.audit(stuck_after_s=-1.0).stuck == [jobs[0].episode_id]
    with ledger.transaction() as session:
        row = session.get(EpisodeRow, jobs[2].episode_id)
        assert row is not None
        row.draw_json = {**row.draw_json, "task": 0}
    audit = store.audit()
    assert audit.duplicated == [jobs[1].episode_id, jobs[2].episode_id] and not audit.ok
    assert audit.counts == {"issued": 2, "running": 1}


def test_runs(ledger: Ledger, store: Store):
    """Created once, loaded, ended; another run in the same ledger is separate."""
    assert store.load_run().config == {"a": 1} and store.load_run().status == "created"
    with pytest.raises(RunError, match="exists already"):
        store.create_run(name="run", kind="rl", seed=3, config={})
    store.set_run_status("failed", "no space left")
    assert (store.load_run().status, store.load_run().error) == ("failed", "no space left")
    with pytest.raises(RunError, match="run run-2 is not in the ledger"):
        Store(ledger, "run-2").load_run()
    Store(ledger, "run-2").create_run(name="b", kind="rl", seed=0, config={})
    store.begin_round("train", 0, stage=0, weight_version_in=0)
    assert Store(ledger, "run-2").rounds() == []
