"""RayCollector: spreads groups over the env runners and does not lose any.

RLlib's own sampling drops what a dead or slow runner held. Here the ledger says which episodes are
finished, and whatever is not goes out again, with the same draws, until the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
import structlog
from ray.exceptions import RayActorError, RayError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from engine.runtime.types import WeightSet
from parl.errors import RoundError
from parl.rllib.engines import CALL_TIMEOUT_S, Engines, one_line
from parl.rllib.env_runner import SampleReport
from parl.rollout.jobs import GroupJob
from parl.store.store import Store

log = structlog.get_logger(__name__)

TAG = "groups"
POLL_S = 0.25
"""How soon a lost runner is noticed; a round whose runners all answer does not wait for it."""
PING_S = 0.05
RETRY_S = 0.5
"""Between two tries to reach a weight store that Ray is restarting."""


class RayCollector:
    """Collector over an EnvRunnerGroup; one call a runner is in flight at a time."""

    def __init__(
        self,
        runners: EnvRunnerGroup,
        engines: Engines,
        weight_store: Any,
        store: Store,
        *,
        max_failures: int,
        publish_timeout_s: float = 120.0,
    ) -> None:
        """``max_failures``: reports of failed or dead runners that one collect survives."""
        self._runners = runners
        self._engines = engines
        self._weight_store = weight_store
        self._store = store
        self._max_failures = max_failures
        self._publish_timeout_s = publish_timeout_s

    def warm_up(self) -> None:
        """Tell every runner to open its sandboxes; nobody waits for it."""
        self._runners.foreach_env_runner(_warm_up, local_env_runner=False, timeout_seconds=0.0)

    def collect(self, groups: Sequence[GroupJob], deadline_s: float) -> None:
        work = _Collection(self._runners, self._store, groups, deadline_s, self._max_failures)
        work.run()

    def publish(self, weights: WeightSet) -> None:
        """Store first: an engine that dies now and restarts finds what the others serve."""
        ref = ray.put(weights)
        try:
            self._store_weights(ref)
        except RayError as error:
            raise RoundError(
                f"weight version {weights.manifest.version} did not reach the weight store: "
                f"{one_line(error)}; check the disk of the run folder, then resume"
            ) from error
        self._engines.load(ref, weights.manifest, self._publish_timeout_s)

    def _store_weights(self, ref: Any) -> None:
        """Ray restarts a store that was killed; publishing the same version twice is one."""
        end = time.monotonic() + CALL_TIMEOUT_S
        while True:
            try:
                ray.get(self._weight_store.publish.remote(ref), timeout=CALL_TIMEOUT_S)
                return
            except RayActorError:
                if time.monotonic() > end:
                    raise
            log.warning("weight_store_restarts")
            time.sleep(RETRY_S)

    def close(self) -> None:
        """Engines end here; the runners are RLlib's."""
        self._engines.close()


class _Collection:
    """One call of ``collect``."""

    def __init__(
        self,
        runners: EnvRunnerGroup,
        store: Store,
        groups: Sequence[GroupJob],
        deadline_s: float,
        max_failures: int,
    ) -> None:
        self._runners = runners
        self._store = store
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s
        self._queue = list(groups)
        self._held: dict[int, list[GroupJob]] = {}
        """Runner id -> what it works on."""
        self._failures_left = max_failures
        self._last_failure = ""

    def run(self) -> None:
        while self._queue or self._held:
            if time.monotonic() > self._end:
                self._give_up()
            self._send()
            if not self._held:
                time.sleep(PING_S)  # every runner is down and Ray brings them back
                continue
            for runner_id, report in self._runners.fetch_ready_async_reqs(
                tags=TAG, timeout_seconds=POLL_S
            ):
                self._take(runner_id, report)
            self._recover()

    def _send(self) -> None:
        """Share the queue out evenly among idle runners."""
        if not self._queue:
            return
        idle = [i for i in self._healthy() if i not in self._held]
        shares = share_out(self._queue, len(idle))
        self._queue = self._queue if not idle else []
        left = max(1.0, self._end - time.monotonic())
        for runner_id, share in zip(idle, shares, strict=True):
            if not share:
                continue
            self._held[runner_id] = share
            call = partial(_sample, groups=share, deadline_s=left)
            self._runners.foreach_env_runner_async(call, tag=TAG, remote_worker_ids=[runner_id])

    def _healthy(self) -> list[int]:
        if self._runners.num_healthy_remote_env_runners() < self._runners.num_remote_env_runners():
            self._runners.probe_unhealthy_env_runners(timeout_seconds=PING_S)
        return self._runners.healthy_env_runner_ids()

    def _take(self, runner_id: int, report: SampleReport) -> None:
        failed = [s for s in report.summaries if s.outcome == "infra_error"]
        if failed:
            raise RoundError(
                f"{len(failed)} episodes failed for good, the first is {failed[0].episode_id}: "
                f"{failed[0].error}; repair the cause and run `parl rl resume`"
            )
        held = self._held.pop(runner_id, [])
        if report.error is not None:
            self._reissue(held, f"{report.runner}: {report.error}")

    def _recover(self) -> None:
        """Queue what runners held that died since the last look."""
        if self._runners.num_healthy_remote_env_runners() == self._runners.num_remote_env_runners():
            return
        healthy = set(self._runners.healthy_env_runner_ids())
        for runner_id in [i for i in self._held if i not in healthy]:
            self._reissue(self._held.pop(runner_id), f"runner-{runner_id} died")

    def _reissue(self, groups: Sequence[GroupJob], reason: str) -> None:
        self._last_failure = reason
        self._failures_left -= 1
        if self._failures_left < 0:
            raise RoundError(f"runners fail again and again, the last one: {reason}; see its log")
        todo = {job.episode_id for job in self._store.issue([j for g in groups for j in g.jobs])}
        left = [part for part in (group.only(todo) for group in groups) if part.jobs]
        log.warning(
            "groups_reissued", why=reason, groups=len(left), episodes=len(todo), held=len(groups)
        )
        self._queue += left

    def _give_up(self) -> None:
        waiting = sum(len(g.jobs) for g in self._queue)
        running = {f"runner-{i}": sum(len(g.jobs) for g in held) for i, held in self._held.items()}
        cause = f"; the last failure was {self._last_failure}" if self._last_failure else ""
        raise RoundError(
            f"the round is not collected after {self._deadline_s:g} s (rollout.round_timeout_s): "
            f"{waiting} episodes wait for a runner, handed out: {running or 'none'}{cause}; `parl "
            "doctor RUN` lists who waits for whom, `parl rl resume` goes on"
        )


def share_out(groups: Sequence[GroupJob], count: int) -> list[list[GroupJob]]:
    """``count`` lists whose episode counts differ by at most one group; a pure function."""
    shares: list[list[GroupJob]] = [[] for _ in range(count)]
    sizes = [0] * count
    for group in groups if count else ():
        lightest = sizes.index(min(sizes))
        shares[lightest].append(group)
        sizes[lightest] += len(group.jobs)
    return shares


def _warm_up(runner: Any) -> None:
    runner.warm_up()


def _sample(runner: Any, groups: list[GroupJob], deadline_s: float) -> SampleReport:
    return runner.sample(groups=groups, deadline_s=deadline_s)
