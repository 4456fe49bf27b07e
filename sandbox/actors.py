"""Ray shells of the sandbox: what the tool proxies of a cluster share."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import ray.exceptions

from infra.errors import ClusterError
from sandbox.quota import LocalQuotas

CALL_TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0
"""Of the actor's process, which the first who asks waits for."""
NAMESPACE = "parl"
QUOTAS_NAME = "parl-proxy-quotas"
"""Of the cluster's actor, in NAMESPACE; its ``set_kill_switch`` is the cluster's."""


class QuotaActor:
    """Holds one LocalQuotas and the kill switch for every proxy of the cluster.

    Start with ``start_quotas``. Restarted, it forgets what was spent and how full the buckets are:
    a cluster's spend cap holds for the actor's life.
    """

    def __init__(self) -> None:
        self._quotas = LocalQuotas()
        self._killed = False

    async def take(self, key: str, rate_per_s: float, burst: float, max_wait_s: float) -> float:
        return await self._quotas.take(key, rate_per_s, burst, max_wait_s)

    async def spend(self, key: str, amount: float, cap: float) -> bool:
        return await self._quotas.spend(key, amount, cap)

    async def killed(self) -> bool:
        return self._killed

    async def set_kill_switch(self, on: bool) -> None:
        """Force every proxy's tools to replay or simulate."""
        self._killed = on


class ClusterQuotas:
    """``sandbox.quota.QuotaStore`` over the actor's handle, and its ``kill_switch``.

    A dead or silent actor raises, so that the proxy refuses instead of going on unlimited.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def take(self, key: str, rate_per_s: float, burst: float, max_wait_s: float) -> float:
        return await self._ask(self._actor.take.remote(key, rate_per_s, burst, max_wait_s))

    async def spend(self, key: str, amount: float, cap: float) -> bool:
        return await self._ask(self._actor.spend.remote(key, amount, cap))

    async def killed(self) -> bool:
        """Pass as ``kill_switch`` to ``sandbox.proxy.server.serve``."""
        return await self._ask(self._actor.killed.remote())

    async def set_kill_switch(self, on: bool) -> None:
        """The whole cluster's."""
        await self._ask(self._actor.set_kill_switch.remote(on))

    @staticmethod
    async def _ask(reference: Any) -> Any:
        return await asyncio.wait_for(reference, CALL_TIMEOUT_S)


def cluster_quotas() -> ClusterQuotas:
    """The one keeper of quotas of the Ray cluster this process belongs to, or of the one that
    RAY_ADDRESS names; the first who asks starts it, and it lives as long as the cluster. Blocks.

    ClusterError without a cluster.
    """
    try:
        if not ray.is_initialized():
            ray.init(address="auto", log_to_driver=False)
        actor = (
            ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(QuotaActor)
            .options(name=QUOTAS_NAME, namespace=NAMESPACE, lifetime="detached", get_if_exists=True)
            .remote()
        )
        ray.get(actor.killed.remote(), timeout=START_TIMEOUT_S)
    except (ConnectionError, ray.exceptions.RayError, ValueError) as error:
        raise ClusterError(
            'quotas.shared = "ray", but there is no Ray cluster: '
            f'{" ".join(str(error).split())[:200]}; start one, or set quotas.shared = "proxy"'
        ) from error
    return ClusterQuotas(actor)


def start_quotas(name: str | None = None) -> Any:
    """The actor's handle, shared under ``name`` where given; it ends with its last handle."""
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(QuotaActor)
    return actor.options(name=name, get_if_exists=name is not None).remote()
