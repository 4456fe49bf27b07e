"""AgentEnvRunner: a process of RLlib's EnvRunnerGroup that runs groups of agent episodes.

It holds nothing that cannot be rebuilt from the configuration: episodes go to the ledger as they
end, and ``sample`` answers with summaries only. There is no ``async def`` in this class: one would
make Ray run it as an async actor, and RolloutWorker's own loop would not start.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.utils.checkpoints import Checkpointable

from engine.actors import RemoteRuntime
from engine.runtime.protocol import ModelRuntime
from infra.db.engine import open_ledger
from infra.leases import LeaseBook
from parl.rllib.pids import record_pid
from parl.rllib.routing import RoutedRuntime
from parl.rollout.jobs import GroupJob
from parl.rollout.worker import EpisodeSummary, RolloutWorker
from parl.rounds.parts import RunParts, rollout_settings, sandbox_config
from parl.store.store import Store
from sandbox.pool import SandboxPool
from sandbox.reaper import reap_lease
from sandbox.shelf import LEASE_KIND

LEASE_TTL_S = 3600.0
"""Renewed at every ``sample``; a dead owner on the same machine is found at once all the same."""


@dataclass(frozen=True, slots=True)
class SampleReport:
    """What a runner answers. ``error`` is one line: the runner could not do its job; what it did
    finish is in the ledger all the same."""

    runner: str
    summaries: tuple[EpisodeSummary, ...]
    error: str | None = None


class AgentEnvRunner(EnvRunner, Checkpointable):
    """One RolloutWorker with its sandboxes and a door to the engines."""

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        torch.set_num_threads(1)
        run = config.run()
        parts = RunParts.of(run)
        self.name = f"runner-{self.worker_index or 0}"
        run_dir = Path(config.run_dir)
        ledger = open_ledger(config.ledger_url, create=False, durable=run.run.durable)
        self._leases = LeaseBook(ledger)
        # what this runner's predecessor left when it was killed
        handlers: dict[str, Any] = {LEASE_KIND: reap_lease}
        self._leases.reap(handlers)
        self._pool = SandboxPool(
            parts.family.bundle,
            size=run.sandbox.pool_size,
            leases=self._leases,  # pyright: ignore[reportArgumentType] - a mapped column is a str
            config=sandbox_config(run, config.run_id),
            lease_ttl_s=LEASE_TTL_S,
        )
        self._worker = RolloutWorker(
            self.name,
            runtime=_connect(config.engine_names, self.name),
            open_session=self._pool.acquire,
            chat=parts.chat,
            ledger=Store(ledger, config.run_id),
            settings=rollout_settings(run),
            run_dir=run_dir,
        )
        self._warm = False
        record_pid(run_dir, self.name, os.getpid())

    # -- work -----------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Open the sandboxes. Errors wait for ``sample``, which opens what is missing."""
        _caught(self._open_boxes)

    def sample(
        self, *, groups: Sequence[GroupJob] = (), deadline_s: float = 600.0, **kwargs: Any
    ) -> SampleReport:
        """Run every episode of ``groups``; never raises, RLlib would kill the runner for it."""
        summaries: list[EpisodeSummary] = []

        def work() -> None:
            self._open_boxes()
            self._leases.renew_all(LEASE_TTL_S)
            summaries.extend(self._worker.run(groups, deadline_s))

        error = _caught(work)
        return SampleReport(self.name, tuple(summaries), error)

    def stop(self) -> None:
        """Close the sandboxes and the event loop. Idempotent."""
        self._worker.call(self._pool.close())
        self._worker.close()

    def _open_boxes(self) -> None:
        if not self._warm:
            self._worker.call(self._pool.start())
            self._warm = True

    # -- what RLlib asks ------------------------------------------------------------------------

    def assert_healthy(self) -> None:
        assert self._worker is not None, f"{self.name} has no worker"

    def make_env(self) -> None:
        """There is no gym environment: a sandbox session is opened for each episode."""

    def get_metrics(self) -> dict[str, Any]:
        """Empty: every number of a round is computed from the ledger."""
        return {}

    def get_spaces(self) -> dict[str, tuple[gym.Space, gym.Space]]:
        observation, action = self.config.observation_space, self.config.action_space
        assert observation is not None and action is not None, "PARLConfig sets both spaces"
        names = (INPUT_ENV_SPACES, INPUT_ENV_SINGLE_SPACES, DEFAULT_MODULE_ID)
        return {str(name): (observation, action) for name in names}

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """A runner has no state of its own."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Ignored, weights above all: RLlib sends them at start and restore, engines serve them."""

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), {"config": self.config}


def _connect(names: Sequence[str], client: str) -> ModelRuntime:
    engines = [RemoteRuntime(ray.get_actor(name), client) for name in names]
    return engines[0] if len(engines) == 1 else RoutedRuntime(engines)


def _caught(work: Any) -> str | None:
    """Run ``work``; its failure as one line. The boundary at which RLlib would end the process."""
    try:
        work()
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), "")
        return f"{type(error).__name__}: {line}"
    return None
