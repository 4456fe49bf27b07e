"""Pure parts of parl.rllib: who gets which group, merged metrics, routing, configuration."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ContextLost
from engine.runtime.types import ContextId, ContextPolicy, DrawKey
from infra.errors import ConfigError
from parl.config import RunConfig
from parl.rllib.algorithm import PARL
from parl.rllib.collector import share_out
from parl.rllib.config import PARLConfig
from parl.rllib.learner_port import merge_metrics
from parl.rllib.pids import read_pids, record_pid
from parl.rllib.routing import RoutedRuntime
from parl.rollout.jobs import EpisodeJob, GroupJob
from sandbox.catalog.registry import get_family

TASK = get_family("lookup_calc").instance(0, 0, "train", "lookup")


def group(index: int, size: int) -> GroupJob:
    return GroupJob(
        tuple(
            EpisodeJob("r", "train", 0, index, sample, TASK, DrawKey(0, 0, index, sample))
            for sample in range(size)
        )
    )


@given(st.lists(st.integers(1, 8), max_size=30), st.integers(1, 5))
def test_groups_are_shared_out_evenly(sizes: list[int], count: int) -> None:
    """Nothing is lost or doubled; loads differ by no more than one group."""
    groups = [group(index, size) for index, size in enumerate(sizes)]
    shares = share_out(groups, count)
    assert sorted(g.key for share in shares for g in share) == sorted(g.key for g in groups)
    loads = [sum(len(g.jobs) for g in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_nobody_idle_gets_nothing() -> None:
    assert share_out([group(0, 2)], 0) == []


def test_metrics_of_ranks_merge_by_what_they_mean() -> None:
    """Sums add, maxima stay, global values are equal, means are weighted by tokens."""
    merged = merge_metrics(
        [
            {"loss": 1.0, "grad_norm": 3.0, "entropy": 1.0, "max_abs_dlogp": 0.1},
            {"loss": 2.0, "grad_norm": 3.0, "entropy": 4.0, "max_abs_dlogp": 0.3},
        ],
        [2, 1],
    )
    assert merged == {"loss": 3.0, "grad_norm": 3.0, "entropy": 2.0, "max_abs_dlogp": 0.3}


class Recorder:
    """An engine that only opens contexts, to see who was asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked = 0

    async def init_context(self, token_ids, policy, media=()) -> ContextId:
        self.asked += 1
        return ContextId(f"{self.name}{self.asked}")

    async def fork(self, ctx, policy=None) -> ContextId:
        return ContextId(f"{ctx}'")


def test_a_group_stays_with_one_engine() -> None:
    """The task index picks the engine; forks follow their parent; foreign ids are lost."""
    runtime = RoutedRuntime([Recorder("a"), Recorder("b")])  # pyright: ignore[reportArgumentType]

    async def scenario() -> None:
        contexts = [
            await runtime.init_context([1], ContextPolicy(draw=DrawKey(0, 0, task)))
            for task in range(4)
        ]
        assert contexts == ["0:a1", "1:b1", "0:a2", "1:b2"]
        assert await runtime.fork(contexts[1]) == "1:b1'"
        for unknown in ("2:x", "b1", "x:y"):
            with pytest.raises(ContextLost, match="build it again"):
                await runtime.fork(ContextId(unknown))

    asyncio.run(scenario())


def test_pids_tell_the_newest_process(tmp_path: Path) -> None:
    assert read_pids(tmp_path) == {}
    record_pid(tmp_path, "engine-0", 1)
    record_pid(tmp_path, "engine-0", 2)
    record_pid(tmp_path, "runner-1", 3)
    assert read_pids(tmp_path) == {"engine-0": 2, "runner-1": 3}


def test_config_survives_rllib_s_round_trip() -> None:
    """State, dict and copy keep the run's settings; fluent changes are validated as the run's."""
    run = RunConfig()
    config = PARLConfig().rl(run_config=run, run_id="r", run_dir="d").engine(max_context=77)
    config.sandbox(pool_size=3)
    assert config.run().engine.max_context == 77 and config.run().sandbox.pool_size == 3
    again = PARLConfig.from_state(config.get_state())
    assert isinstance(again, PARLConfig)
    assert again.algo_class is PARL
    assert again.run() == config.run() and again.run_id == "r"
    assert again.num_env_runners == run.ray.num_runners
    with pytest.raises(ValueError, match="max_contexx"):
        config.engine(max_contexx=1)


def test_config_refuses_roads_our_tokens_do_not_take() -> None:
    config = PARLConfig().rl(run_config=RunConfig(), run_id="r", run_dir="d")
    config.env_runners(num_env_runners=0)
    with pytest.raises(ConfigError, match="num_env_runners=0; expected at least 1"):
        config.validate()
    config.env_runners(num_env_runners=1).evaluation(evaluation_interval=1)
    with pytest.raises(ConfigError, match="evaluation_interval=1; expected None"):
        config.validate()
