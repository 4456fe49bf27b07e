"""Small runs on the Ray cluster that the modules of a test process share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.cluster.connect import ClusterHandle
from infra.config import load_config
from infra.db.engine import Ledger, open_ledger
from parl.config import RunConfig
from parl.rounds.parts import RunParts
from parl.store.store import Store
from tests.clusters import local_cluster

ROOT = Path(__file__).parents[2]
RUN_ID = "test-001"
SMALL = ("warm_start.num_demonstrations=48", "warm_start.clean_steps=30", "rounds.eval_episodes=0")


@pytest.fixture(scope="module")
def cluster() -> ClusterHandle:
    return local_cluster(2)


def small_config(*overrides: str) -> RunConfig:
    """configs/test.toml with a shorter warm start."""
    return load_config(RunConfig, [ROOT / "configs" / "test.toml"], [*SMALL, *overrides])


def new_ledger(folder: Path, config: RunConfig) -> tuple[str, Ledger]:
    """(url, open ledger) that holds the run's row."""
    url = f"sqlite:///{folder / 'ledger.db'}"
    ledger = open_ledger(url)
    Store(ledger, RUN_ID).create_run(
        name="test", kind="rl", seed=config.run.seed, config=config.model_dump(mode="json")
    )
    return url, ledger


def warm(config: RunConfig, machine: Any) -> None:
    """Restore and warm-start, as parl.rounds.experiment does."""
    machine.restore()
    start = RunParts.of(config).warm_start()
    machine.warm_start(lambda learner: start(learner, lambda *_: None))


@pytest.fixture(scope="module")
def build(
    cluster: ClusterHandle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """build(config) -> a RayRun on the session's cluster, closed after the module."""
    from parl.rllib.build import RayRun, build_ray

    runs: list[RayRun] = []

    def make(config: RunConfig, folder: Path | None = None) -> RayRun:
        folder = folder or tmp_path_factory.mktemp("run")
        url = f"sqlite:///{folder / 'ledger.db'}"
        runs.append(build_ray(config, run_id=RUN_ID, run_dir=folder, ledger_url=url))
        return runs[-1]

    yield make
    for run in runs:
        run.close()  # a second stop is fine
