"""The cluster's quotas behind a Ray actor, as tool proxies use them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.exceptions

from infra.cluster.connect import ClusterHandle
from sandbox.actors import NAMESPACE, QUOTAS_NAME, ClusterQuotas, start_quotas
from sandbox.config import SandboxConfig
from sandbox.guardian import Guardian
from sandbox.proxied import ProxyDoor
from sandbox.proxy.proxy import ToolProxy
from sandbox.proxy.result import ProxyResult
from sandbox.task import load_task
from tests.sandbox.proxied_tasks import api_task, operator
from tests.sandbox.proxy.api import ApiServer
from tests.sandbox.proxy.conftest import api_config

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


async def gone(actor: Any) -> None:
    """Ray ends an actor a moment after ``ray.kill`` returns; until then it still answers."""
    for _ in range(600):
        try:
            await actor.killed.remote()
        except ray.exceptions.RayActorError:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the actor still answers 30 s after ray.kill")


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
            await gone(actor)
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


def test_every_process_finds_the_clusters_keeper(cluster: ClusterHandle, tmp_path: Path) -> None:
    """quotas.shared = "ray" in two operators' files: one bucket, one switch."""
    api = ApiServer()
    bucket = {"cluster": {"rate_per_s": 0.001, "burst": 3}, "max_wait_s": 0, "shared": "ray"}
    folders = [tmp_path / name for name in ("a", "b")]
    tasks, doors = [], []
    for folder in folders:
        folder.mkdir()
        quotas = json.dumps(bucket).replace(": ", " = ").replace('"shared"', "shared")
        for key in ("cluster", "rate_per_s", "burst", "max_wait_s"):
            quotas = quotas.replace(f'"{key}"', key)
        file = operator(folder, api)
        file.write_text(f"quotas = {quotas}\n" + file.read_text())
        tasks.append(load_task(api_task(folder / "task", api, mode="live")).spec)
        settings = SandboxConfig(allow_live=True, proxy_file=file, proxy_dir=folder / "node")
        doors.append(ProxyDoor(settings, Guardian()))

    async def go() -> list[str | None]:
        errors: list[str | None] = []
        try:
            for door, spec in zip(doors, tasks, strict=True):
                tools = await door.open(spec, "e")
                assert tools is not None
                for number in range(3):
                    called = await tools.episode.call("weather", {"city": str(number)})
                    errors.append(called.error)
        finally:
            for door in doors:
                await door.close()
        return errors

    try:
        assert asyncio.run(go()) == [None] * 3 + ["shared_quota"] * 3
    finally:
        api.stop()
        ray.kill(ray.get_actor(QUOTAS_NAME, namespace=NAMESPACE))
    assert api.hits["GET weather"] == 3
