"""PARLConfig: RLlib's view of a run. The run's own settings travel inside as plain JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import gymnasium as gym
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from infra.errors import ConfigError
from parl.config import RunConfig
from parl.rllib.env_runner import AgentEnvRunner
from parl.rllib.learner import PARLTorchLearner
from parl.rllib.module import PolicyModule

TEXT_SPACE = gym.spaces.Text(max_length=1_000_000)
"""RLlib wants spaces; ours are text in and text out, whatever the task."""
CPUS_PER_LEARNER = 0.5


class PARLConfig(AlgorithmConfig):
    """New API stack only: RLlib starts, restarts and checkpoints; tokens never pass through it.

    PARLConfig().rl(run_config=..., run_id=..., run_dir=...).build_algo()
    """

    default_algo_class: ClassVar[type[Algorithm] | None] = None
    """parl.rllib.algorithm puts PARL here: the two modules must not import each other."""

    def __init__(self, algo_class: type[Algorithm] | None = None) -> None:
        super().__init__(algo_class=algo_class or self.default_algo_class)
        # plain picklable values only: RLlib compares attributes with != and pickles them
        self.run_config: dict[str, Any] = {}
        self.run_id = ""
        self.run_dir = ""
        self.ledger_url = ""
        self.engine_names: list[str] = []
        """Actors the runners look up; PARL.setup fills it in."""
        self._set_defaults()

    def _set_defaults(self) -> None:
        self.framework("torch")
        self.environment(observation_space=TEXT_SPACE, action_space=TEXT_SPACE)
        self.env_runners(
            env_runner_cls=AgentEnvRunner,
            create_local_env_runner=False,
            # our collector re-issues what is lost and keeps the deadline; RLlib would drop it
            sample_timeout_s=None,
            # several runners and the engine share the cores of a laptop while they start
            validate_env_runners_after_construction=False,
            add_default_connectors_to_env_to_module_pipeline=False,
            add_default_connectors_to_module_to_env_pipeline=False,
        )
        self.learners(
            learner_class=PARLTorchLearner, add_default_connectors_to_learner_pipeline=False
        )
        self.fault_tolerance(
            restart_failed_env_runners=True,
            # 60 s by default, slept inside the failing runner
            delay_between_env_runner_restarts_s=0,
        )
        # weights go learner -> weight store -> engines; runners hold no model
        self._dont_auto_sync_env_runner_states = True
        self.debugging(log_level="ERROR")

    # -- fluent ---------------------------------------------------------------------------------

    @classmethod
    def from_run_config(
        cls,
        run: RunConfig,
        *,
        run_id: str,
        run_dir: Path,
        ledger_url: str,
        algo_class: type[Algorithm] | None = None,
    ) -> Self:
        """The configuration of one run; ``ledger_url`` must open from every node."""
        return cls(algo_class=algo_class).rl(
            run_config=run, run_id=run_id, run_dir=run_dir, ledger_url=ledger_url
        )

    def rl(
        self,
        *,
        run_config: RunConfig | Mapping[str, Any] | None = None,
        run_id: str | None = None,
        run_dir: Path | str | None = None,
        ledger_url: str | None = None,
    ) -> Self:
        """What to run and where it is written; what is not given stays."""
        if run_config is not None:
            self._take(run_config)
        if run_id is not None:
            self.run_id = run_id
        if run_dir is not None:
            self.run_dir = str(run_dir)
        if ledger_url is not None:
            self.ledger_url = ledger_url
        return self

    def engine(self, **settings: Any) -> Self:
        """Change fields of RunConfig.engine."""
        return self._change("engine", settings)

    def sandbox(self, **settings: Any) -> Self:
        """Change fields of RunConfig.sandbox."""
        return self._change("sandbox", settings)

    def run(self) -> RunConfig:
        """The run's settings as an object."""
        return RunConfig.model_validate(self.run_config)

    def _change(self, section: str, settings: Mapping[str, Any]) -> Self:
        whole = self.run().model_dump(mode="json")
        whole[section] |= settings
        self._take(whole)
        return self

    def _take(self, run_config: RunConfig | Mapping[str, Any]) -> None:
        run = RunConfig.model_validate(
            run_config.model_dump() if isinstance(run_config, RunConfig) else dict(run_config)
        )
        self.run_config = run.model_dump(mode="json")
        ray = run.ray
        self.env_runners(
            num_env_runners=ray.num_runners,
            num_cpus_per_env_runner=ray.cpus_per_runner,  # pyright: ignore[reportArgumentType]
        )
        self.learners(
            num_learners=ray.num_learners,
            num_cpus_per_learner=CPUS_PER_LEARNER,
        )
        self.resources(num_cpus_for_main_process=0)
        self.rl_module(rl_module_spec=self.get_default_rl_module_spec())

    # -- what RLlib asks ------------------------------------------------------------------------

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        run = self.run()
        return RLModuleSpec(
            module_class=PolicyModule,
            observation_space=TEXT_SPACE,
            action_space=TEXT_SPACE,
            model_config={"model": run.model.model_dump(mode="json"), "seed": run.run.seed},
        )

    def get_default_learner_class(self) -> type[PARLTorchLearner]:
        return PARLTorchLearner

    def validate(self) -> None:
        """ConfigError when RLlib was asked for a road that our tokens do not take."""
        if self.algo_class is None:
            raise ConfigError(
                "PARLConfig has no algo_class; import PARL from parl.rllib.algorithm first"
            )
        super().validate()
        if self.in_evaluation:  # RLlib validates a copy for evaluation runners we never start
            return
        if not self.num_env_runners:
            raise ConfigError(
                f"num_env_runners={self.num_env_runners}; expected at least 1 (ray.num_runners): "
                'for a run without Ray set backend = "local"'
            )
        if self.evaluation_interval:
            raise ConfigError(
                f"evaluation_interval={self.evaluation_interval}; expected None: held-out tasks "
                "are run by RoundMachine.evaluate (rounds.eval_episodes)"
            )

    @property
    def needed_cpus(self) -> float:
        """CPUs Ray must be able to promise before a run of this shape can start."""
        ray = self.run().ray
        learners = ray.num_learners * CPUS_PER_LEARNER
        return (
            ray.num_runners * ray.cpus_per_runner + ray.num_engines * ray.cpus_per_engine + learners
        )
