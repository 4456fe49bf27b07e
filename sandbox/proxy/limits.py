"""QuotaGate: every bucket and budget a call must pass before it is sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

from sandbox.proxy.config import BucketConfig, QuotaConfig
from sandbox.proxy.errors import EpisodeQuota, SharedQuota
from sandbox.proxy.world import WorldTool
from sandbox.quota import LocalQuotas, QuotaStore

_STORE_TIMEOUT_S = 5.0
_log = logging.getLogger("parl.proxy")
T = TypeVar("T")


class QuotaGate:
    """The episode's own buckets live here; those of tools, credentials and the cluster in
    ``shared``, which may be remote. An empty own bucket counts against the policy, a shared one
    does not."""

    def __init__(self, config: QuotaConfig, shared: QuotaStore | None = None) -> None:
        self._config = config
        self._own = LocalQuotas()
        self._shared: QuotaStore = shared if shared is not None else LocalQuotas()

    async def admit(self, episode: str, world: str, tool: WorldTool, upstream_key: str) -> None:
        """Take a token of every bucket, wait as long as the slowest asks, charge the cost.

        EpisodeQuota, SharedQuota: refused, or the keeper of shared quotas does not answer.
        """
        own_s = 0.0
        if self._config.episode is not None:
            own_s = await self._take_own(f"{episode}/calls", self._config.episode)
            if own_s < 0:
                raise EpisodeQuota("this episode calls too fast; make fewer calls")
        shared_s = await self._take_shared(world, tool, upstream_key)
        await self._charge(episode, tool.config.cost)
        await asyncio.sleep(max(own_s, shared_s))

    async def admit_again(self, world: str, tool: WorldTool, upstream_key: str) -> None:
        """Another attempt of an admitted call: a token of every shared bucket, as the upstream sees
        one more request; the episode's own are not its doing. SharedQuota."""
        await asyncio.sleep(await self._take_shared(world, tool, upstream_key))

    async def _take_shared(self, world: str, tool: WorldTool, upstream_key: str) -> float:
        """Seconds to wait."""
        config = self._config
        shared = {
            f"tool:{world}/{tool.spec.name}": tool.config.rate,
            f"key:{upstream_key}": config.upstream_key,
            "cluster": config.cluster,
        }
        waits = [0.0]
        for key, bucket in shared.items():
            if bucket is None:
                continue
            wait_s = await self._ask(
                self._shared.take(key, bucket.rate_per_s, bucket.burst, config.max_wait_s)
            )
            if wait_s < 0:
                raise SharedQuota(f"the quota {key.partition(':')[0]} is used up")
            waits.append(wait_s)
        return max(waits)

    def forget(self, episode: str) -> None:
        """The episode is over."""
        self._own.forget(f"{episode}/")

    async def _take_own(self, key: str, bucket: BucketConfig) -> float:
        return await self._own.take(key, bucket.rate_per_s, bucket.burst, self._config.max_wait_s)

    async def _charge(self, episode: str, cost: float) -> None:
        if cost == 0:
            return
        own_cap, cluster_cap = self._config.spend_per_episode, self._config.spend_cluster
        if own_cap is not None and not await self._own.spend(f"{episode}/spent", cost, own_cap):
            raise EpisodeQuota(f"the episode's budget of {own_cap:g} is used up")
        if cluster_cap is not None and not await self._ask(
            self._shared.spend("cluster", cost, cluster_cap)
        ):
            raise SharedQuota(f"the cluster's budget of {cluster_cap:g} is used up")

    @staticmethod
    async def _ask(answer: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(answer, _STORE_TIMEOUT_S)
        except Exception as error:  # whatever a remote keeper raises: without it nothing is sent
            _log.warning("quota store: %s", type(error).__name__)
            raise SharedQuota("the keeper of shared quotas does not answer") from None
