"""PARL: RLlib's Algorithm as control plane. It starts, finds, restarts and ends the parts of a run;
what a round does is parl.rounds.RoundMachine's business, and ``training_step`` is a shell over it.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import structlog
from ray.exceptions import RayError
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.tune.execution.placement_groups import PlacementGroupFactory

from infra.db.engine import Ledger, open_ledger
from infra.db.models import RunRow
from parl.actors import start_weight_store
from parl.config import RunConfig
from parl.errors import RunError
from parl.rllib.collector import PING_S, RayCollector
from parl.rllib.config import PARLConfig
from parl.rllib.engines import Engines, one_line
from parl.rllib.learner_port import LearnerGroupPort
from parl.rounds.machine import RoundMachine
from parl.rounds.parts import RunParts
from parl.rounds.reports import RoundReport
from parl.store.store import Store
from parl.weights.store import WeightStore

log = structlog.get_logger(__name__)

STOP_TIMEOUT_S = 10.0


class PARL(Algorithm):
    """``machine`` is the run; ``last_report`` the newest round of ``train()``."""

    config: PARLConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    machine: RoundMachine
    last_report: RoundReport | None = None

    @classmethod
    def get_default_config(cls) -> PARLConfig:
        return PARLConfig(algo_class=cls)

    # -- life -----------------------------------------------------------------------------------

    def setup(self, config: AlgorithmConfig) -> None:
        """Weight store, engines, runners and learners; engines and runners start side by side."""
        # our collector says in one line what RLlib says with a traceback
        logging.getLogger("ray.rllib.utils.actor_manager").setLevel(logging.CRITICAL)
        key = uuid.uuid4().hex[:12]  # trials of one Tune run share everything else
        run = self.config.run()
        self._name_run(run, key)
        run_dir = Path(self.config.run_dir)
        self._ledger = open_ledger(self.config.ledger_url, durable=run.run.durable)
        store = Store(self._ledger, self.config.run_id)
        _ensure_run(self._ledger, store, run, run_dir)
        store_name = f"parl-weights-{key}"
        self._weight_store = start_weight_store(run_dir / "weights", name=store_name)
        self._engines = Engines.start(run, store_name, run_dir, key, self._engine_bundle)
        self._thawed(engine_names=self._engines.names)
        try:
            with native_stderr(Path(self.logdir or run_dir) / "start.log"):
                super().setup(self.config)
        except IndexError as error:  # RLlib takes the first of no answers
            raise RunError(self._why_no_runner()) from error
        assert self.env_runner_group is not None and self.learner_group is not None
        collector = RayCollector(
            self.env_runner_group,
            self._engines,
            self._weight_store,
            store,
            max_failures=run.rollout.max_attempts * run.ray.num_runners,
        )
        collector.warm_up()
        self._parts = RunParts.of(run)
        self.machine = RoundMachine(
            run,
            store=store,
            weights=WeightStore(run_dir / "weights"),
            learner=LearnerGroupPort(self.learner_group, self.save_to_path),
            collector=collector,
            tasks=self._parts.tasks,
            jobs=self._parts.jobs(self.config.run_id),
            run_dir=run_dir,
        )

    def _why_no_runner(self) -> str:
        """What the constructor of the first runner said, in one line."""
        assert self.env_runner_group is not None
        runner = self.env_runner_group._worker_manager._actors[1]
        try:
            ray.get(runner.ping.remote(), timeout=STOP_TIMEOUT_S)
        except RayError as error:
            return f"no env runner could start: {one_line(error)}"
        return "no env runner answered while it started; start the run again"

    def _setup_logdir(self) -> None:
        """RLlib's own results folder; not ~/ray_results/<stamp> when the run has a folder."""
        if self._storage is not None or not self.config.run_dir:
            super()._setup_logdir()
            return
        self._logdir = str(Path(self.config.run_dir) / "rllib")
        Path(self._logdir).mkdir(parents=True, exist_ok=True)

    def _name_run(self, run: RunConfig, key: str) -> None:
        """A run nobody named (Tune) gets a name and a folder of its own."""
        run_id = self.config.run_id or f"{run.run.name}-{key}"
        run_dir = Path(self.config.run_dir or f"{self.logdir}/{run_id}").resolve()
        ledger_url = self.config.ledger_url or f"sqlite:///{run_dir / 'ledger.db'}"
        self._thawed(run_id=run_id, run_dir=str(run_dir), ledger_url=ledger_url)

    def _thawed(self, **values: Any) -> None:
        """Set attributes of the frozen config; before RLlib's setup hands it to anybody."""
        config = self.config.copy(copy_frozen=False)
        for name, value in values.items():
            setattr(config, name, value)
        config.freeze()
        self.config = config

    def _engine_bundle(self, index: int) -> int | None:
        """Engine bundles are the last ones of a trial's placement group."""
        group = ray.util.get_current_placement_group()
        if group is None:
            return None
        return group.bundle_count - self.config.run().ray.num_engines + index

    def cleanup(self) -> None:
        """End every actor, even one that does not answer any more."""
        group: EnvRunnerGroup | None = self.env_runner_group
        if group is not None:
            group.foreach_env_runner(
                lambda runner: runner.stop(),
                local_env_runner=False,
                timeout_seconds=STOP_TIMEOUT_S,
            )
            # RLlib's own stop would wait for ever for a runner whose event loop hangs; this kills
            group.reset([])
        super().cleanup()
        self._engines.close()
        ray.kill(self._weight_store)
        self._ledger.close()

    # -- rounds ---------------------------------------------------------------------------------

    def training_step(self) -> None:
        """One RL round; a run that was never warm-started is, first."""
        self._begin()
        report = self.machine.step()
        self.last_report = report
        self._log_report(report)

    def _begin(self) -> None:
        """Under Tune nobody restores and warm-starts the machine; parl.rounds.experiment does."""
        if self.machine.weight_version >= 0:
            return
        self.machine.restore()
        warm_start = self._parts.warm_start()
        self.machine.warm_start(lambda learner: warm_start(learner, lambda *_: None))

    def _log_report(self, report: RoundReport) -> None:
        values: dict[str, float] = {
            "index": report.index,
            "weight_version": report.weight_version,
            "stage": report.stage,
            "reward_mean": report.reward_mean,
            "num_episodes": sum(report.outcomes.values()),
        }
        for name, part in (
            ("success", report.success),
            ("mean_tokens", report.mean_tokens),
            ("learner", report.metrics),
            ("seconds", report.seconds),
            ("outcomes", report.outcomes),
        ):
            values |= {f"{name}/{key}": value for key, value in part.items()}
        for name, value in values.items():
            # window=1: RLlib's default is a slow moving average
            key = ("round", *name.split("/", 1))
            self.metrics.log_value(key, float(value), reduce="mean", window=1)

    # -- RLlib's hooks --------------------------------------------------------------------------

    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        """A restarted runner needs nothing: it holds no weights and no state."""
        return env_runner_group.probe_unhealthy_env_runners(timeout_seconds=PING_S)

    @classmethod
    def default_resource_request(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, config: AlgorithmConfig | dict[str, Any]
    ) -> PlacementGroupFactory:
        """RLlib's bundles, then one an engine: bundle indices before them are RLlib's."""
        factory = super().default_resource_request(config)
        assert isinstance(factory, PlacementGroupFactory)
        resolved = cls.get_default_config().update_from_dict(dict(config))
        assert isinstance(resolved, PARLConfig)
        shape = resolved.run().ray
        engines = [{"CPU": shape.cpus_per_engine}] * shape.num_engines
        return PlacementGroupFactory([*factory.bundles, *engines], strategy=factory.strategy)


@contextmanager
def native_stderr(path: Path) -> Iterator[None]:
    """What C++ writes to stderr meanwhile goes to ``path``.

    Ray prints an error line at every start of runners: RLlib passes their configuration by
    reference, and Ray cannot know that EnvRunnerGroup keeps the reference alive (issue 53727).
    """
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _ensure_run(ledger: Ledger, store: Store, run: RunConfig, run_dir: Path) -> None:
    """The command line writes the run's row before it starts Ray; Tune and notebooks do not."""
    with ledger.session() as session:
        known = session.get(RunRow, store.run_id) is not None
    if not known:
        store.create_run(
            name=run.run.name,
            kind="rl",
            seed=run.run.seed,
            config=run.model_dump(mode="json"),
            run_dir=str(run_dir),
        )


PARLConfig.default_algo_class = PARL
