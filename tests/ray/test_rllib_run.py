"""A whole run on Ray whose parts are killed under way, against the same run in one process."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from sqlalchemy import select

from infra.db.engine import Ledger, open_ledger
from infra.db.models import EpisodeRow
from parl.bench.run_trace import RunTrace, differences, read_trace
from parl.rllib.build import RayRun
from parl.rllib.pids import read_pids
from parl.rounds.local import build_local
from parl.store.store import Store
from tests.ray.conftest import RUN_ID, new_ledger, small_config, warm

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
NUM_ROUNDS = 3
CONFIG = small_config(f"rounds.num_rounds={NUM_ROUNDS}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunTrace:
    """The same configuration in this process."""
    folder = tmp_path_factory.mktemp("local")
    _, ledger = new_ledger(folder, CONFIG)
    machine = build_local(CONFIG, RUN_ID, folder, ledger)
    warm(CONFIG, machine)
    while not machine.finished:
        machine.step()
    machine.close()
    return read_trace(ledger, RUN_ID)


class Killer(threading.Thread):
    """SIGKILLs the process ``name`` once ``worker`` has running episodes of round ``index``."""

    def __init__(self, folder: Path, name: str, worker: str, index: int) -> None:
        super().__init__(daemon=True)
        self._folder, self._name, self._worker, self._index = folder, name, worker, index
        self.pid = 0

    def run(self) -> None:
        ledger = open_ledger(f"sqlite:///{self._folder / 'ledger.db'}", create=False)
        running = select(EpisodeRow.id).where(
            EpisodeRow.round_index == self._index,
            EpisodeRow.phase == "train",
            EpisodeRow.state == "running",
            EpisodeRow.worker == self._worker,
        )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with ledger.session() as session:
                if session.scalars(running).first() is not None:
                    self.pid = read_pids(self._folder)[self._name]
                    os.kill(self.pid, signal.SIGKILL)
                    return
            time.sleep(0.005)


class Disturbed:
    """The run on Ray: a runner dies in round 0, the engine in round 1, nobody in round 2."""

    def __init__(self, build: Callable[..., RayRun], folder: Path) -> None:
        self.folder = folder
        self.run = build(CONFIG, folder)
        warm(CONFIG, self.run.machine)
        self.killed: dict[str, int] = {}
        self.results: list[dict[str, Any]] = []
        for victim, index in (("runner-1", 0), ("engine-0", 1)):
            # runner-1 may still be starting again in round 1
            killer = Killer(folder, victim, "runner-1" if index == 0 else "runner-2", index)
            killer.start()
            self.results.append(self.run.algorithm.train())
            killer.join()
            self.killed[victim] = killer.pid
        self.results.append(self.run.algorithm.train())
        self.ledger: Ledger = open_ledger(f"sqlite:///{folder / 'ledger.db'}", create=False)
        self.trace = read_trace(self.ledger, RUN_ID)


@pytest.fixture(scope="module")
def disturbed(build: Callable[..., RayRun], tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    return Disturbed(build, tmp_path_factory.mktemp("disturbed"))


def test_kills_do_not_change_a_bit(disturbed: Disturbed, undisturbed: RunTrace) -> None:
    """Rewards, losses and weights of a run on Ray with a killed runner and a killed engine equal
    those of one process, bit for bit."""
    assert len(undisturbed.numbers) == NUM_ROUNDS
    assert differences(undisturbed, disturbed.trace) == []


def test_killed_runner_is_replaced(disturbed: Disturbed) -> None:
    """What it held is issued again and told in the ledger; Ray starts another process."""
    assert disturbed.killed["runner-1"] > 0
    events = Store(disturbed.ledger, RUN_ID).events(kind="episode_reissued")
    assert any(event.data["before"] == "runner-1" for event in events)
    deadline = time.monotonic() + 30
    while read_pids(disturbed.folder)["runner-1"] == disturbed.killed["runner-1"]:
        assert time.monotonic() < deadline, "runner-1 did not come back"
        time.sleep(0.1)


def test_killed_engine_comes_back_with_the_newest_weights(disturbed: Disturbed) -> None:
    """Ray restarted it and it fetched version 1 by itself: round 1 finished with no new publish."""
    assert 0 < disturbed.killed["engine-0"] != read_pids(disturbed.folder)["engine-0"]
    trajectories = Store(disturbed.ledger, RUN_ID).load_trajectories("train", 1)
    assert {turn.weight_version for t in trajectories for turn in t.turns} == {1}


def test_a_killed_weight_store_is_waited_for(disturbed: Disturbed) -> None:
    """Ray restarts it; the publish that met it dead is made again."""
    store = disturbed.run.algorithm._weight_store
    weights = ray.get(ray.get(store.locate.remote())[0])
    ray.kill(store, no_restart=False)
    disturbed.run.machine._collector.publish(weights)
    assert ray.get(store.latest.remote()) == weights.manifest.version == NUM_ROUNDS


def test_results_reach_rllib(disturbed: Disturbed) -> None:
    """``train()`` returns the round's numbers of this iteration, not an average."""
    for index, result in enumerate(disturbed.results):
        assert result["training_iteration"] == index + 1
        assert result["round"]["index"] == index
        loss, _ = disturbed.trace.numbers[f"train/{index}"]
        assert result["round"]["learner"]["loss"] == pytest.approx(loss, rel=1e-6)


def test_checkpoint_restores_every_bit(disturbed: Disturbed, tmp_path: Path) -> None:
    """After save, an update and restore, weights and the next update are those before."""
    machine = disturbed.run.machine
    learner = machine._learner
    samples = [
        t.to_training_sample()
        for t in machine.store.load_trajectories("train", 2)
        if t.turns and t.correctness is not None
    ]
    advantages = [1.0 if i % 2 else -1.0 for i in range(len(samples))]
    learner.update(samples, advantages)
    learner.save(tmp_path)
    before = learner.weights()
    first = learner.update(samples, advantages)
    after = learner.weights()
    learner.restore(tmp_path)
    assert _equal(learner.weights(), before)
    again = learner.update(samples, advantages)
    assert (first["loss"], first["grad_norm"]) == (again["loss"], again["grad_norm"])
    assert _equal(learner.weights(), after)
    # RLlib's own tree, beside it, rolls back the same state
    disturbed.run.algorithm.restore_from_path(str(tmp_path / "rllib"))
    assert _equal(learner.weights(), before)
    learner.update(samples, advantages)
    assert _equal(learner.weights(), after)


def _equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)
