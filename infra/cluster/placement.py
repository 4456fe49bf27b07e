"""Reserve places for actors: named bundles of resources, or one line that says what is missing.

placement = place(cluster, {"learner": {"CPU": 1}, "engine": {"CPU": 2, "GPU": 1}})
Engine.options(num_gpus=1, **placement.options("engine")).remote()
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from infra.cluster.connect import ClusterHandle
from infra.errors import ClusterError

Bundle = Mapping[str, float]
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Reserved bundles; they stay reserved until ``remove`` or the end of the driver."""

    group: PlacementGroup
    names: tuple[str, ...]

    def options(self, name: str) -> dict[str, Any]:
        """Keywords for ``Actor.options``: run in the bundle of this name, children too."""
        strategy = PlacementGroupSchedulingStrategy(
            self.group, self.names.index(name), placement_group_capture_child_tasks=True
        )
        return {"scheduling_strategy": strategy}

    def remove(self) -> None:
        """Give the resources back; actors in the bundles are killed."""
        remove_placement_group(self.group)


def place(
    cluster: ClusterHandle,
    bundles: Mapping[str, Bundle],
    *,
    strategy: Strategy = "PACK",
    timeout_s: float = 60.0,
) -> Placement:
    """Reserve all ``bundles`` or none, waiting up to ``timeout_s``.

    ClusterError names the bundle that does not fit and what the cluster has; at once when no node
    of a local cluster is large enough, for it cannot grow.
    """
    if cluster.is_local:
        large = _too_large(bundles)
        if large is not None:
            raise ClusterError(_message(large, bundles, "no node is large enough"))
    group = placement_group([dict(bundle) for bundle in bundles.values()], strategy=strategy)
    if group.wait(timeout_s):
        return Placement(group, tuple(bundles))
    # read before removing: afterwards the group's own reservations look free
    name = _too_large(bundles) or _first_without_room(bundles, ray.available_resources())
    reason = f"no room after {timeout_s:g} s with strategy {strategy}"
    message = _message(name, bundles, reason)
    remove_placement_group(group)
    raise ClusterError(message)


def _too_large(bundles: Mapping[str, Bundle]) -> str | None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, bundle in bundles.items():
        if not any(_fits(bundle, node) for node in nodes):
            return name
    return None


def _first_without_room(bundles: Mapping[str, Bundle], free: Mapping[str, float]) -> str:
    """The first bundle that the free resources, taken as one pool, do not hold."""
    left = dict(free)
    for name, bundle in bundles.items():
        if not _fits(bundle, left):
            return name
        for resource, amount in bundle.items():
            left[resource] = left.get(resource, 0.0) - amount
    # it fits the pool but not the nodes: the largest is the hardest to place
    return max(bundles, key=lambda name: sum(bundles[name].values()))


def _fits(bundle: Bundle, room: Mapping[str, float]) -> bool:
    return all(room.get(resource, 0.0) >= amount - 1e-9 for resource, amount in bundle.items())


def _message(name: str, bundles: Mapping[str, Bundle], reason: str) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    num_nodes = sum(1 for node in ray.nodes() if node["Alive"])
    asked = dict.fromkeys(resource for bundle in bundles.values() for resource in bundle)
    has = ", ".join(f"{r} {total.get(r, 0):g} ({free.get(r, 0):g} free)" for r in asked)
    needs = ", ".join(f"{resource} {amount:g}" for resource, amount in bundles[name].items())
    return (
        f"bundle {name!r} ({needs}) cannot be placed: {reason}; the cluster has {has} on "
        f"{num_nodes} node{'s' if num_nodes != 1 else ''} for {len(bundles)} bundles; ask for less "
        "or add nodes"
    )
