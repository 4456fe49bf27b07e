"""What only a container has: its profile, labels, image, engine, and ways to be left behind."""

import asyncio
import hashlib
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.leases import process_owner
from sandbox.backends import docker_engine as engine
from sandbox.backends.base import Level
from sandbox.backends.choice import open_backend
from sandbox.backends.docker_image import base_reference, rootfs
from sandbox.backends.program import BoxProgram
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable, SandboxLost
from sandbox.reaper import process_host, reap_box
from tests.sandbox.conftest import CONFIG, RunInBox, need
from tests.sandbox.test_boxes import SOURCE, call, start

PROGRAM = BoxProgram("tools.py", SOURCE)


@pytest.fixture
def client() -> Iterator[Any]:
    """A client of the engine, skipped where there is none."""
    need(Level.DOCKER)
    with engine.connected() as connected:
        yield connected


def containers(client: Any, box_id: str) -> list[Any]:
    """What is left of a box."""
    mine = {"label": f"{engine.LABEL_BOX}={box_id}"}
    return client.containers.list(all=True, ignore_removed=True, filters=mine)


def gone(client: Any, box_id: str, within_s: float = 10.0) -> bool:
    """Removed in time."""
    deadline = time.monotonic() + within_s
    while left := containers(client, box_id):
        if time.monotonic() > deadline:
            return not left
        time.sleep(0.05)
    return True


@pytest.mark.docker
def test_the_hardened_profile_is_always_on(client: Any, in_box: RunInBox):
    """Every setting of facts/sandboxes.md 5.2, as the engine holds it."""

    async def body(box: Any) -> None:
        state = client.api.inspect_container(box.container_id)
        host, config = state["HostConfig"], state["Config"]
        memory = CONFIG.memory_mib << 20
        assert host["NetworkMode"] == "none" and host["IpcMode"] == "none"
        assert host["Memory"] == host["MemorySwap"] == memory
        assert host["PidsLimit"] == CONFIG.max_processes + 2
        assert host["NanoCpus"] == int(CONFIG.cpus * 1e9)
        assert host["CapDrop"] == ["ALL"] and not host["CapAdd"] and not host["Privileged"]
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert host["ReadonlyRootfs"] and host["AutoRemove"] and not host["Binds"]
        assert host["LogConfig"]["Type"] == "none"
        assert {u["Name"]: u["Hard"] for u in host["Ulimits"]}["core"] == 0
        assert f"size={CONFIG.disk_mib << 20}" in host["Tmpfs"]["/box"]
        assert not host["Devices"] and not state["Mounts"] and not host["PortBindings"]
        user = config["User"].split(":")
        assert user[0] == user[1] == str(box.enforced["uid"])
        labels = config["Labels"]
        assert labels[engine.LABEL_OWNER] == process_owner()
        assert float(labels[engine.LABEL_EXPIRES]) > time.time()
        assert {engine.LABEL_RUN, engine.LABEL_EPISODE} <= set(labels)

    in_box(Level.DOCKER, SOURCE, body)


@pytest.mark.docker
def test_a_paused_container_is_lost_and_removed(client: Any, in_box: RunInBox):
    """Nothing inside can answer; the deadline holds and the removal works all the same."""

    async def body(box: Any) -> None:
        await start(box)
        client.api.pause(box.container_id)
        with pytest.raises(SandboxLost, match="not answered within"):
            await box.request("ping", {}, 0.5)
        assert gone(client, box.box_id)

    in_box(Level.DOCKER, SOURCE, body)


@pytest.mark.docker
def test_a_lost_container_says_what_the_engine_knows(client: Any, in_box: RunInBox):
    """Killed from outside: its exit status, not just a closed stream."""

    async def body(box: Any) -> None:
        await start(box)
        client.api.kill(box.container_id)
        with pytest.raises(SandboxLost, match=r"exit status 137"):
            await call(box, "count")
        assert gone(client, box.box_id)

    in_box(Level.DOCKER, SOURCE, body)


@pytest.mark.docker
def test_a_limit_that_did_not_take_is_an_error(client: Any, in_box: RunInBox):
    """The record is read back from the cgroup: another value there is no value."""

    async def body(box: Any) -> None:
        backend: Any = need(Level.DOCKER)
        client.api.update_container(box.container_id, mem_limit="64m", memswap_limit="64m")
        state = client.api.inspect_container(box.container_id)
        version = box.enforced["cgroup_version"]
        with pytest.raises(BackendUnavailable, match=r"asked for .* the cgroup has"):
            backend._read_back(state, box._groups, version, 1)

    in_box(Level.DOCKER, SOURCE, body)


@pytest.mark.docker
def test_a_cancelled_start_leaves_no_container(client: Any):
    """At any moment of it."""
    backend = need(Level.DOCKER)

    async def go(after_s: float) -> str:
        box_id = secrets.token_hex(8)
        opening = asyncio.ensure_future(backend.open(box_id, PROGRAM))
        await asyncio.sleep(after_s)
        opening.cancel()
        try:
            await (await opening).kill()
        except asyncio.CancelledError:
            return box_id
        return box_id

    for after_s in (0.0, 0.05, 0.3, 0.6):
        assert gone(client, asyncio.run(go(after_s)), within_s=5)


@pytest.mark.docker
def test_the_reaper_takes_expired_and_ownerless_containers_only(client: Any):
    """At every start of a backend: a dead owner or a passed expiry, whatever else runs."""
    backend: Any = need(Level.DOCKER)

    async def go() -> None:
        box = await backend.open(secrets.token_hex(8), PROGRAM, owner="episode-1")
        made = []
        labels = {
            "dead": {engine.LABEL_OWNER: process_owner().rpartition(":")[0] + ":1"},
            "expired": {engine.LABEL_EXPIRES: f"{time.time() - 1:.0f}"},
            "other": {engine.LABEL_OWNER: "another-host/1:2:3"},
        }
        for name, own in labels.items():
            profile = backend._profile(f"{name}-{secrets.token_hex(4)}", 200_001, "")
            profile["labels"] |= own
            made.append(client.api.create_container(**profile)["Id"])
        assert containers(client, box.box_id)[0].labels[engine.LABEL_EPISODE] == "episode-1"
        assert {c.id for c in engine.left_containers(client)} >= set(made[:2])
        open_backend(Level.DOCKER, CONFIG)
        left = {container.id for container in client.containers.list(all=True)}
        assert not left & set(made[:2]) and made[2] in left and box.alive
        await start(box)
        await box.kill()
        engine.remove_container(client, made[2])

    asyncio.run(go())


@pytest.mark.docker
def test_the_lease_reaper_removes_a_container_by_its_name(client: Any):
    """Also one that only exists, and twice."""
    backend: Any = need(Level.DOCKER)
    box_id = secrets.token_hex(8)
    client.api.create_container(**backend._profile(box_id, 200_001, ""))
    data = {"box_id": box_id, "host": process_host(), "process": None, **backend.footprint(box_id)}
    assert containers(client, box_id)
    reap_box(data)
    assert not containers(client, box_id)
    reap_box(data)


@pytest.mark.docker
def test_an_old_container_retires(client: Any):
    """It must be gone before somebody else may remove it."""
    backend: Any = open_backend(
        Level.DOCKER, SandboxConfig(**{**CONFIG.model_dump(), "max_age_s": 3700.0})
    )

    async def go() -> None:
        box = await backend.open(secrets.token_hex(8), PROGRAM)
        assert not box.worn
        box._born -= 101  # as if it were that much older
        assert box.worn
        await box.kill()

    asyncio.run(go())


@pytest.mark.docker
def test_the_base_image_is_made_from_local_files_and_reproducible(client: Any):
    """Same files, same bytes, same tag; and the engine runs exactly that image."""
    assert hashlib.sha256(rootfs()).hexdigest()[:16] == base_reference().rpartition(":")[2]
    assert client.images.get(base_reference()).id


@pytest.mark.docker
def test_an_image_must_be_pinned_and_local(client: Any):
    """A tag may change under a run; a pull would need the network. By id it works."""
    for image, words in (
        ("python:3.11", "not pinned"),
        (f"python@sha256:{'0' * 64}", "not on this engine"),
    ):
        with pytest.raises(BackendUnavailable, match=words):
            open_backend(Level.DOCKER, SandboxConfig(level="docker", image=image))
    image = client.images.get(base_reference()).id
    backend: Any = open_backend(Level.DOCKER, SandboxConfig(level="docker", image=image))

    async def go() -> None:
        box = await backend.open(secrets.token_hex(8), PROGRAM)
        assert box.enforced["image"] == image
        await box.kill()

    asyncio.run(go())


@pytest.mark.docker
def test_a_container_ends_with_its_stream(client: Any, in_box: RunInBox):
    """Also in the middle of a call: nobody would read the answer."""

    async def body(box: Any) -> None:
        await start(box)
        params = {"tool": "sleep", "arguments": {"seconds": 60}, "max_output_bytes": 9}
        asking = asyncio.ensure_future(box.request("call", {**params, "timeout_s": 60}, 60))
        await asyncio.sleep(0.3)
        box._channel.close()
        assert gone(client, box.box_id)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    in_box(Level.DOCKER, SOURCE, body)


@pytest.mark.docker
def test_a_box_leaves_no_descriptor_behind():
    """Of the stream, of the SDK's connection."""
    backend = need(Level.DOCKER)

    async def go() -> None:
        box = await backend.open(secrets.token_hex(8), PROGRAM)
        await box.kill()

    asyncio.run(go())  # connections the client keeps
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        asyncio.run(go())
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + 1


@pytest.mark.docker
def test_stdout_of_the_container_is_the_agents_alone(in_box: RunInBox):
    """A tool that prints, or writes to every descriptor it finds, forges no answer."""
    source = SOURCE + (
        "\n@tool\ndef noise() -> str:\n    import sys\n    print('x' * 100000, flush=True)\n"
        "    for name in os.listdir('/proc/1/fd') if os.access('/proc/1/fd', os.R_OK) else []:\n"
        "        os.write(os.open('/proc/1/fd/' + name, os.O_WRONLY), b'x')\n    return 'done'\n"
    )

    async def body(box: Any) -> None:
        await start(box)
        assert await call(box, "noise") == ("done", None)
        assert await call(box, "count") == ("1", None)

    in_box(Level.DOCKER, source, body)


@pytest.mark.docker
def test_a_stopped_agent_ends_with_the_owner(client: Any, in_box: RunInBox):
    """SIGSTOP from the host: the kill does not depend on the agent's help."""

    async def body(box: Any) -> None:
        await start(box)
        os.kill(box.host_pid, signal.SIGSTOP)
        with pytest.raises(SandboxLost):
            await box.request("ping", {}, 0.3)
        assert gone(client, box.box_id)

    in_box(Level.DOCKER, SOURCE, body)


def test_no_engine_is_one_clear_line(monkeypatch: pytest.MonkeyPatch):
    """What is missing and what to do; a remote engine is refused."""
    pytest.importorskip("docker")
    for host, words in (
        ("unix:///nonexistent/docker.sock", "no engine answers"),
        ("tcp://127.0.0.1:1", "not a local socket"),
    ):
        monkeypatch.setenv("DOCKER_HOST", host)
        with pytest.raises(BackendUnavailable, match=words) as caught:
            open_backend(Level.DOCKER, CONFIG)
        assert "\n" not in str(caught.value)
        assert json.dumps(str(caught.value))
