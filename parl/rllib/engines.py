"""The engine actors of a run: started before everything else, fed from the weight store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import structlog
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.actors import start_engine
from engine.runtime.types import EngineInfo, WeightManifest, WeightSet
from parl.actors import FetchWeights
from parl.config import RunConfig
from parl.errors import RoundError
from parl.rllib.pids import record_pid

log = structlog.get_logger(__name__)

CALL_TIMEOUT_S = 30.0
_PAUSE_S = 0.1


class NewestWeights:
    """``fetch_weights()`` of an engine that starts: the newest version, or None before the first.

    Picklable; waits while the store restarts. WeightsError when it stays away.
    """

    def __init__(self, store_name: str, timeout_s: float = 60.0) -> None:
        # by name: a handle would put the engine's constructor arguments into the object store,
        # and an actor cannot be restarted once they are evicted from there (ray issue 53727)
        self._store_name = store_name
        self._timeout_s = timeout_s

    def __call__(self) -> WeightSet | None:
        deadline = time.monotonic() + self._timeout_s
        store = ray.get_actor(self._store_name)
        newest: Any = None
        while True:
            try:
                left = max(0.01, deadline - time.monotonic())
                newest = ray.get(store.latest.remote(), timeout=left)
                break
            except (RayActorError, GetTimeoutError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)
        return None if newest is None else FetchWeights(store, self._timeout_s)(newest)


class Announce:
    """Writes an engine's pid into the run folder once it serves; picklable."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._run_dir = run_dir
        self._name = name

    def __call__(self, pid: int) -> None:
        record_pid(self._run_dir, self._name, pid)


class Engines:
    """Handles of all engines; the owner: they end with the last handle."""

    def __init__(self, actors: Sequence[Any], names: Sequence[str]) -> None:
        self._actors = list(actors)
        self.names = list(names)

    @staticmethod
    def start(
        run: RunConfig,
        store_name: str,
        run_dir: Path,
        key: str,
        bundle_of: Callable[[int], int | None],
    ) -> Engines:
        """Returns at once; the actors start in the background. ``key`` makes names unique in the
        cluster; ``bundle_of(i)`` is a bundle of this process's placement group, if it has one."""
        names = [f"parl-engine-{key}-{index}" for index in range(run.ray.num_engines)]
        actors = [
            start_engine(
                run.model,
                run.engine,
                name=name,
                num_cpus=run.ray.cpus_per_engine,
                options=_placed(bundle_of(index)),
                fetch_weights=NewestWeights(store_name),
                announce=Announce(run_dir, f"engine-{index}"),
                num_threads=run.ray.engine_threads,
            )
            for index, name in enumerate(names)
        ]
        return Engines(actors, names)

    def load(self, ref: ray.ObjectRef, manifest: WeightManifest, timeout_s: float) -> None:
        """Every engine serves ``manifest``. An engine that dies meanwhile fetches it by itself.

        RoundError when one does not within ``timeout_s``, with the reason it gave last.
        """
        deadline = time.monotonic() + timeout_s
        waiting = {
            index: actor.load_weights.remote(ref) for index, actor in enumerate(self._actors)
        }
        while waiting:
            failures: dict[int, str] = {}
            for index, pending in waiting.items():
                reason = self._loaded(index, pending, manifest, deadline)
                if reason is not None:
                    failures[index] = reason
            if failures and time.monotonic() > deadline:
                index, reason = next(iter(failures.items()))
                free = ray.available_resources().get("CPU", 0.0)
                raise RoundError(
                    f"engine {index} did not load weight version {manifest.version} within "
                    f"{timeout_s:g} s: {reason} ({free:g} CPUs are free in the cluster); see its "
                    "log in Ray's session folder, then resume"
                )
            if failures:
                time.sleep(_PAUSE_S)
            waiting = {index: self._actors[index].load_weights.remote(ref) for index in failures}

    def _loaded(
        self, index: int, pending: Any, manifest: WeightManifest, deadline: float
    ) -> str | None:
        """None when the engine reports the manifest's version and checksum, else why not."""
        try:
            left = max(0.1, min(CALL_TIMEOUT_S, deadline - time.monotonic()))
            ray.get(pending, timeout=left)
            info: EngineInfo = ray.get(self._actors[index].info.remote(), timeout=left)
        except (RayError, GetTimeoutError) as error:
            reason = one_line(error)
            log.warning("engine_not_loaded", engine=index, error=reason)
            return reason
        if (info.weight_version, info.weight_checksum) != (manifest.version, manifest.checksum):
            return (
                f"it reports version {info.weight_version} with checksum "
                f"{info.weight_checksum[:12]}, expected {manifest.checksum[:12]}"
            )
        return None

    def close(self) -> None:
        """Kill the actors; idempotent."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()


def one_line(error: BaseException) -> str:
    """Kind and the last meaningful line: Ray puts the cause of a task's error at the end."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"


def _placed(bundle: int | None) -> dict[str, Any]:
    """Tune puts a trial in a placement group, in which only reserved bundles have room."""
    if bundle is None:
        return {}
    group = ray.util.get_current_placement_group()
    assert group is not None, f"bundle {bundle} of no placement group"
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle)}
