"""Ray shells of the top floor."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from engine.errors import WeightsError
from engine.runtime.types import WeightSet
from parl.weights.store import WeightStore


class WeightStoreActor:
    """Holds a WeightStore and one object-store copy of each served version.

    Engines fetch from it in ``__init__``: an engine that Ray restarts by itself would otherwise
    serve random weights. Its own restart costs nothing but a read from disk.
    """

    def __init__(self, root: str, keep_on_disk: int = 3) -> None:
        self._store = WeightStore(Path(root), keep_on_disk=keep_on_disk)
        self._refs: dict[int, ray.ObjectRef] = {}

    def publish(self, weights: WeightSet) -> int:
        """Pass an ObjectRef: Ray hands the value in. Returns the version."""
        self._store.publish(weights)
        version = weights.manifest.version
        self._refs = {v: ref for v, ref in self._refs.items() if v in self._store.versions()}
        self._refs[version] = ray.put(weights)
        return version

    def locate(self, version: int | None = None) -> list[ray.ObjectRef]:
        """A list of one ref (a bare ref would be resolved on the way). WeightsError if unknown."""
        wanted = self._store.latest() if version is None else version
        if wanted is None or wanted not in self._refs:
            weights = self._store.fetch(wanted)
            wanted = weights.manifest.version
            self._refs[wanted] = ray.put(weights)
        return [self._refs[wanted]]

    def latest(self) -> int | None:
        return self._store.latest()


def start_weight_store(root: Path, *, keep_on_disk: int = 3, name: str | None = None) -> Any:
    """Start the actor; keep the handle, the actor ends with its last one."""
    actor = ray.remote(num_cpus=0, max_restarts=-1)(WeightStoreActor)
    return actor.options(name=name).remote(str(root), keep_on_disk)


class FetchWeights:
    """``fetch_weights(version)`` of an engine: picklable, survives restarts of the store."""

    def __init__(self, store: Any, timeout_s: float = 60.0) -> None:
        self._store = store
        self._timeout_s = timeout_s

    def __call__(self, version: int | None = None) -> WeightSet:
        """A verified version (None = latest). WeightsError when it does not exist or did not
        arrive within ``timeout_s``."""
        deadline = time.monotonic() + self._timeout_s
        pause_s = 0.05
        while True:
            left = max(0.01, deadline - time.monotonic())
            try:
                (ref,) = ray.get(self._store.locate.remote(version), timeout=left)
                return ray.get(ref, timeout=left)
            except RayTaskError as error:
                if isinstance(error.cause, WeightsError):
                    raise error.cause from error
                raise
            except (RayActorError, GetTimeoutError, RayError) as error:
                # the store restarts or the node with the copy is gone: it reads from disk again
                if time.monotonic() + pause_s > deadline:
                    raise WeightsError(
                        f"weight version {'latest' if version is None else version} did not come "
                        f"from the weight store within {self._timeout_s:.0f} s "
                        f"({type(error).__name__}); check the store's actor and its disk"
                    ) from error
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 2.0)
