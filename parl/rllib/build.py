"""build_ray: a cluster and a PARL on it, for the command line and for tests."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.cluster.config import ClusterConfig
from infra.cluster.connect import ClusterHandle, connect
from infra.errors import ClusterError
from parl.config import RunConfig

if TYPE_CHECKING:
    from parl.rllib.algorithm import PARL

Say = Callable[[str], None]


class RayRun:
    """A built run; ``close`` ends its actors and the cluster if it was started here."""

    def __init__(self, algorithm: PARL, cluster: ClusterHandle) -> None:
        self.algorithm = algorithm
        self.cluster = cluster

    @property
    def machine(self) -> Any:
        return self.algorithm.machine

    def step(self) -> Any:
        """One RL round through ``PARL.train``; its report."""
        self.algorithm.train()
        return self.algorithm.last_report

    def close(self) -> None:
        self.algorithm.stop()
        self.cluster.shutdown()


def build_ray(
    config: RunConfig,
    *,
    run_id: str,
    run_dir: Path,
    ledger_url: str,
    say: Say = lambda line: None,
    cluster: ClusterConfig | None = None,
    connected: Callable[[], None] = lambda: None,
) -> RayRun:
    """Connect or start a cluster and build the run on it. ``say`` gets a line a step; ``connected``
    is called once Ray has taken over this process's signals.

    ClusterError: no cluster, or one that is too small. ConfigError, LedgerError.
    """
    started = time.perf_counter()
    # RLlib takes seconds to import; Ray's daemons take as long to start, in processes of their own
    loader = threading.Thread(
        target=importlib.import_module, args=("parl.rllib.algorithm",), daemon=True
    )
    loader.start()
    handle = connect(cluster or cluster_config(config))
    connected()
    say(f"ray at {handle.address} after {time.perf_counter() - started:.1f} s")
    try:
        loader.join()
        from parl.rllib.algorithm import PARL
        from parl.rllib.config import PARLConfig

        settings = PARLConfig.from_run_config(
            config, run_id=run_id, run_dir=run_dir, ledger_url=ledger_url, algo_class=PARL
        )
        # "You are running PARL on the new API stack!", at every start
        logging.getLogger("ray.rllib").setLevel(logging.ERROR)
        _check_room(handle, settings.needed_cpus)
        algorithm = settings.build_algo()
    except BaseException:
        handle.shutdown()
        raise
    assert isinstance(algorithm, PARL)
    shape = config.ray
    say(
        f"{shape.num_engines} engine, {shape.num_runners} runners, "
        f"{shape.num_learners or 'local'} learner ready after {time.perf_counter() - started:.1f} s"
    )
    return RayRun(algorithm, handle)


def cluster_config(config: RunConfig) -> ClusterConfig:
    return ClusterConfig(address=config.ray.address, num_cpus=config.ray.num_cpus)


def _check_room(handle: ClusterHandle, needed: float) -> None:
    """Ray would wait for ever, without a word, for CPUs that do not exist."""
    has = handle.resources.get("CPU", 0.0)
    if needed > has + 1e-9:
        raise ClusterError(
            f"the run asks for {needed:g} CPUs, the cluster has {has:g}; lower "
            "ray.cpus_per_runner, ray.cpus_per_engine or their numbers, or set ray.num_cpus for a "
            "local cluster"
        )
