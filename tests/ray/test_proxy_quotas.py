"""The cluster's quotas behind a Ray actor, as tool proxies use them."""

import asyncio
from pathlib import Path

import pytest
import ray

from infra.cluster.connect import ClusterHandle
from sandbox.actors import ClusterQuotas, start_quotas
from sandbox.proxy.proxy import ToolProxy
from sandbox.proxy.result import ProxyResult
from tests.sandbox.proxy.api import ApiServer
from tests.sandbox.proxy.conftest import api_config

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


def test_two_proxies_share_one_bucket_and_one_switch(
    cluster: ClusterHandle, tmp_path: Path
) -> None:
    """Twenty calls through two nodes' proxies against a bucket of five: five pass. With the switch
    on nothing passes; an actor that is gone is a switch that is on."""
    actor = start_quotas()
    api = ApiServer()
    shared = ClusterQuotas(actor)
    bucket = {"cluster": {"rate_per_s": 0.001, "burst": 5}, "max_wait_s": 0}

    async def go() -> list[list[ProxyResult]]:
        folders = [tmp_path / name for name in ("a", "b")]
        for folder in folders:
            folder.mkdir()
        proxies = [
            ToolProxy(
                api_config(folder, api, quotas=bucket), quotas=shared, kill_switch=shared.killed
            )
            for folder in folders
        ]
        try:
            tokens = []
            for proxy in proxies:
                await proxy.start()
                tokens.append((await proxy.open_episode("e", "w")).token)
            first = await asyncio.gather(
                *(
                    proxy.call(token, "weather", {"city": str(number)})
                    for number in range(10)
                    for proxy, token in zip(proxies, tokens, strict=True)
                )
            )
            await actor.set_kill_switch.remote(True)
            switched = [await proxies[0].call(tokens[0], "weather", {"city": "x"})]
            await actor.set_kill_switch.remote(False)
            ray.kill(actor)
            lost = [await proxies[1].call(tokens[1], "weather", {"city": "x"})]
            return [list(first), switched, lost]
        finally:
            for proxy in proxies:
                await proxy.close()

    try:
        first, switched, lost = asyncio.run(go())
    finally:
        api.stop()
    assert [result.error for result in first].count(None) == 5
    assert {result.error for result in first} == {None, "shared_quota"}
    assert switched[0].error == "CASSETTE_MISS"
    assert (lost[0].error, lost[0].infra) == ("CASSETTE_MISS", True)
    assert api.hits["GET weather"] == 5
