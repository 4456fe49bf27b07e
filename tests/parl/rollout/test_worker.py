"""Groups and workers: shared prompts, bounded concurrency, and what the ledger says afterwards."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from infra.db.engine import open_ledger
from infra.errors import LedgerError
from parl.errors import RunError, WaitTimeout
from parl.rollout.episode import run_episode
from parl.rollout.group import run_group
from parl.rollout.jobs import GroupJob, group_jobs
from parl.rollout.waits import Waits
from parl.rollout.worker import RolloutWorker
from parl.store import Store
from parl.trajectory import Trajectory
from reward_models.episode import Outcome
from tests.parl.rollout.test_episode import assert_same_tokens
from tests.parl.rollout.tiny import (
    FAMILY,
    FAST,
    Boxes,
    LineChat,
    TinyRuntime,
    add_task,
    lookup_task,
    make_job,
    make_world,
    oracle_policy,
    to_text,
)


@pytest.fixture
def store(tmp_path) -> Iterator[Store]:
    ledger = open_ledger(f"sqlite:///{tmp_path}/ledger.db")
    store = Store(ledger, "run-1")
    store.create_run(name="run", kind="rl", seed=3, config={})
    store.begin_round("train", 0, stage=0, weight_version_in=0)
    yield store
    ledger.close()


def make_groups(num_tasks: int, num_samples: int) -> list[GroupJob]:
    task = add_task()
    return group_jobs([make_job(task, s, t) for t in range(num_tasks) for s in range(num_samples)])


def make_worker(ledger, boxes=None, settings=FAST, run_dir=None, **engine):
    runtime = TinyRuntime(oracle_policy(add_task()), **engine)
    boxes = boxes or Boxes()
    worker = RolloutWorker(
        "w0",
        runtime=runtime,
        open_session=boxes,
        chat=LineChat(),
        ledger=ledger,
        settings=settings,
        run_dir=run_dir,
    )
    return worker, runtime, boxes


def test_a_group_shares_its_prompt_and_nothing_else():
    """One prompt, a fork a sample, other draws; each sample is what it would be alone."""
    task = add_task()
    jobs = [make_job(task, sample) for sample in range(4)]
    world, runtime, boxes = make_world(oracle_policy(task))
    results = asyncio.run(run_group(GroupJob(tuple(jobs)), world))
    assert runtime.num_forks == 4 and not runtime.contexts and not boxes.open
    texts = set()
    for job, result in zip(jobs, results, strict=True):
        assert isinstance(result, Trajectory) and result.episode_id == job.episode_id
        alone, _, _ = make_world(oracle_policy(task))
        assert_same_tokens(result, asyncio.run(run_episode(job, alone)))
        texts.add(to_text(result.turns[0].sampled_ids))
    assert len(texts) == 4


def test_a_group_survives_an_engine_that_is_away_at_its_start():
    """Without a shared prompt each episode opens its own context."""
    jobs = tuple(make_job(add_task(), sample) for sample in range(3))
    world, runtime, _ = make_world(oracle_policy(add_task()), faults={1: "full", 9: "die"})
    results = asyncio.run(run_group(GroupJob(jobs), world))
    assert all(isinstance(r, Trajectory) and r.correctness == 1.0 for r in results)
    assert not runtime.contexts


def test_groups_are_of_one_task():
    """Jobs are split by task, in order; a mixed group is refused; a group can be cut down."""
    groups = make_groups(2, 2)
    assert [g.key for g in groups] == ["run-1/train/00000/00000", "run-1/train/00000/00001"]
    with pytest.raises(ValueError, match="holds episodes of 2 tasks"):
        GroupJob(groups[0].jobs + groups[1].jobs)
    assert groups[0].only({groups[0].jobs[1].episode_id}).jobs == groups[0].jobs[1:]
    assert groups[0].only(set()).jobs == ()


def test_a_worker_runs_groups_and_writes_the_ledger(store: Store, tmp_path):
    """Every episode ends as finished; a second run on the same worker works too."""
    groups = make_groups(3, 4)
    worker, runtime, boxes = make_worker(store, run_dir=tmp_path)
    for first, last in ((0, 2), (2, 3)):
        part = groups[first:last]
        todo = store.issue([job for group in part for job in group.jobs])
        summaries = worker.run(group_jobs(todo), deadline_s=30)
        assert [s.episode_id for s in summaries] == [job.episode_id for job in todo]
        assert {s.outcome for s in summaries} == {Outcome.COMPLETED}
    worker.close()
    worker.close()
    loaded = store.load_trajectories("train", 0)
    assert len(loaded) == 12 and store.counts() == {"finished": 12} and store.audit().ok
    for trajectory in loaded:
        trajectory.check()
    assert runtime.num_forks == 12 and not runtime.contexts and not boxes.open
    assert json.loads((tmp_path / "waits-w0.json").read_text())["waits"] == []


def test_concurrency_is_bounded(store: Store):
    """Never more boxes than the pool holds."""
    most = 0

    class Counting(Boxes):
        async def __call__(self, spec, owner="", **options):
            nonlocal most
            session = await super().__call__(spec, owner, **options)
            most = max(most, len(self.open))
            return session

    groups = make_groups(4, 4)
    store.issue([job for group in groups for job in group.jobs])
    worker, _, _ = make_worker(store, Counting(), replace(FAST, max_concurrent=5))
    worker.run(groups)
    worker.close()
    assert most == 5 and store.counts() == {"finished": 16}


def test_restarts_are_on_record(store: Store):
    """A dead box costs an attempt, and the ledger says which and why."""
    groups = make_groups(1, 2)
    store.issue(list(groups[0].jobs))
    worker, _, boxes = make_worker(store, Boxes({3: "lost"}))
    worker.run(groups)
    worker.close()
    (event,) = store.events("episode_reissued")
    assert event.data["reason"].startswith("SandboxLost: box died in")
    assert boxes.num_opened == 3 and store.audit().attempts == 1


def test_the_deadline_leaves_finished_work_and_no_leaks(store: Store):
    """What hangs is cancelled, gives its things back and may be issued again."""
    groups = make_groups(2, 2)
    jobs = [job for group in groups for job in group.jobs]
    store.issue(jobs)
    worker, runtime, boxes = make_worker(store, Boxes({9: "hang"}))
    with pytest.raises(WaitTimeout, match=r"w0 waited .* for its 2 groups"):
        worker.run(groups, deadline_s=0.5)
    assert store.counts() == {"finished": 3, "running": 1}
    assert not runtime.contexts and not boxes.open
    left = store.issue(jobs)
    summaries = worker.run(group_jobs(left))
    worker.close()
    assert len(summaries) == 1 and store.counts() == {"finished": 4}


def test_a_failing_ledger_ends_the_run(store: Store):
    """Running on without a book of record would lose episodes; boxes and contexts come back."""

    class FullDisk:
        def mark_running(self, episode_id, worker, reason=""):
            return store.mark_running(episode_id, worker, reason)

        def finish(self, trajectory):
            raise LedgerError("ledger: the disk is full")

    groups = make_groups(3, 2)
    store.issue([job for group in groups for job in group.jobs])
    worker, runtime, boxes = make_worker(FullDisk())
    with pytest.raises(LedgerError, match="disk is full"):
        worker.run(groups)
    worker.close()
    assert not runtime.contexts and not boxes.open


def test_an_episode_that_comes_back_different_ends_the_run(store: Store):
    """Draws that do not reproduce must not pass silently."""
    groups = make_groups(1, 1)
    store.issue(list(groups[0].jobs))
    worker, runtime, _ = make_worker(store)
    worker.run(groups)
    runtime.policy = oracle_policy(lookup_task())
    with pytest.raises(RunError, match="is 'finished' and cannot become 'running'"):
        worker.run(groups)
    worker.close()


def test_a_worker_runs_coroutines_of_its_collaborators(store: Store):
    """A sandbox pool starts and closes on the worker's loop."""
    worker, _, _ = make_worker(store)

    async def loop_id():
        return id(asyncio.get_running_loop())

    assert worker.call(loop_id()) == worker.call(loop_id())
    worker.close()


def test_the_waits_file_stays_true_when_the_loop_hangs(store: Store, tmp_path):
    """It is written by a thread of its own: owner, what, since and deadline of every wait."""
    groups = make_groups(1, 1)
    store.issue(list(groups[0].jobs))
    worker, _, boxes = make_worker(store, Boxes({2: "hang"}), run_dir=tmp_path)
    path = tmp_path / "waits-w0.json"
    seen = []

    def look():
        for _ in range(40):
            time.sleep(0.05)
            if path.exists():
                seen.extend(json.loads(path.read_text())["waits"])

    looker = threading.Thread(target=look)
    looker.start()
    with pytest.raises(WaitTimeout):
        worker.run(groups, deadline_s=1.3)
    looker.join()
    worker.close()
    calls = [wait for wait in seen if wait["what"] == "sandbox.call"]
    assert calls and calls[0]["owner"] == groups[0].jobs[0].episode_id
    assert calls[0]["deadline"] > calls[0]["since"] > time.time() - 60
    assert not boxes.open


def test_a_wait_passes_on_a_timeout_that_is_not_its_own():
    """TimeoutError of the awaited work is not relabelled."""

    async def body():
        waits = Waits("w0")
        with pytest.raises(TimeoutError, match="inner"):
            async with waits.on("me", "it", 10.0):
                raise TimeoutError("inner")
        with pytest.raises(WaitTimeout, match=r"me waited 0\.0 s for it without an answer"):
            async with waits.on("me", "it", 0.01):
                await asyncio.Event().wait()
        assert waits.snapshot() == []

    asyncio.run(body())


def test_family_is_solvable_in_this_world():
    """The oracle's policy earns 1 on both task types."""
    for task in (lookup_task(), add_task()):
        world, _, _ = make_world(oracle_policy(task))
        trajectory = asyncio.run(run_episode(make_job(task), world))
        assert trajectory.correctness == 1.0
        assert trajectory.final_text == FAMILY.oracle(task).final_text
