"""Infrastructure failures give reward null, never 0, and are counted by kind; what the policy does
to itself is its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import CapacityError, ContextLost
from infra.errors import LedgerError
from parl.errors import StaleWeights, WaitTimeout
from parl.rollout.failures import Failure, failure_of
from reward_models.episode import Outcome
from sandbox.backends.base import Level
from sandbox.config import SandboxConfig
from sandbox.errors import ProxyLost, SandboxError, SandboxLost
from sandbox.task import load_task
from sandbox.tool_session import ToolSession
from tests.engine.tiny import MODEL, make_engine
from tests.parl.rollout import infra
from tests.parl.rollout.tiny import script
from tests.sandbox import proxied_tasks
from tests.sandbox.conftest import DOCKER, need
from tests.sandbox.proxy.api import ApiServer

ROOT = Path(__file__).parents[3]
NAP, DONE = '?nap {"seconds": 5}', "done"
STORM = [f'?status {{"code": "{500 + number}"}}' for number in range(12)]
READS = [f'?weather {{"city": "city {number}"}}' for number in range(12)]


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.stop()


def level(name: Level) -> SandboxConfig:
    need(name)
    return SandboxConfig.model_validate({"level": name.value, "disk_mib": 4, "start_timeout_s": 60})


def test_an_engine_that_is_down(tmp_path: Path):
    """A real engine ends when every box is open and before the first token, for good."""
    engine = make_engine(model=MODEL.model_copy(update={"vocab_size": 256}))
    played = infra.play(
        tmp_path,
        engine,
        config=level(Level.A),
        broken=lambda session: engine.close(),
        num_episodes=2,
    )
    infra.assert_nobodys_reward(played, "engine")
    assert played.attempts == 6 and "LightEngine was closed" in str(played.errors[0])


def kill_box(session: ToolSession) -> None:
    """From outside, in the middle of the episode's first call."""
    box = session._box

    def kill() -> None:
        if box.level is Level.DOCKER:
            from sandbox.backends.docker_engine import connected

            (name,) = need(Level.DOCKER).footprint(box.box_id)["containers"]
            with connected() as client:
                client.api.kill(name)
        else:
            assert box.pid is not None
            os.kill(box.pid, signal.SIGKILL)

    asyncio.get_running_loop().call_later(0.5, kill)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [Level.A, DOCKER])
def test_a_box_that_is_killed_each_time(tmp_path: Path, name: Level):
    """After three attempts nobody's reward."""
    played = infra.play(tmp_path, script(NAP, DONE), config=level(name), broken=kill_box)
    infra.assert_nobodys_reward(played, "sandbox")
    assert played.attempts == 3 and "SandboxLost" in str(played.errors[0])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [Level.A, DOCKER])
def test_a_box_that_is_killed_once(tmp_path: Path, name: Level):
    """The second attempt earns its reward; nothing is counted as failed."""
    killed = []

    def kill_first(session: ToolSession) -> None:
        if not killed:
            killed.append(session)
            kill_box(session)

    policy = script(NAP.replace("5", "0.6"), DONE)
    played = infra.play(tmp_path, policy, config=level(name), broken=kill_first)
    assert played.outcomes == [Outcome.COMPLETED] and played.correctness == [1.0]
    assert played.rewards[0] is not None and played.rewards[0] > 0
    assert played.failures == {} and played.attempts == 2


def live(tmp_path: Path, api: ApiServer, **changes: object) -> SandboxConfig:
    operator = proxied_tasks.operator(tmp_path, api)
    return proxied_tasks.config(allow_live=True, proxy_file=operator, **changes)


def test_a_storm_of_5xx(tmp_path: Path, api: ApiServer):
    """The API of the task's tools fails again and again."""
    loaded = load_task(proxied_tasks.api_task(tmp_path / "task", api, mode="live"))
    played = infra.play(
        tmp_path,
        script(*STORM),
        task=loaded.spec,
        bundle=loaded.bundle,
        config=live(tmp_path, api),
    )
    infra.assert_nobodys_reward(played, "api")
    assert "upstream_5xx" in str(played.errors[0])


def test_a_full_disk_of_the_proxy(tmp_path: Path, api: ApiServer):
    """Calls that cannot be written into the audit log do not run, on a file system that is full."""
    loaded = load_task(proxied_tasks.api_task(tmp_path / "task", api, mode="live"))
    with infra.small_disk(tmp_path / "disk", "256k") as disk:
        played = infra.play(
            tmp_path,
            script(*READS),
            task=loaded.spec,
            bundle=loaded.bundle,
            config=live(tmp_path, api, proxy_dir=disk / "node"),
            broken=lambda session: infra.fill_up(disk) and None,
        )
    infra.assert_nobodys_reward(played, "disk")
    assert "record_failed" in str(played.errors[0])


def test_a_full_disk_of_the_ledger(tmp_path: Path):
    """The worker's run ends with one clear line, the episode has no reward; with room again the
    same episode is played to its end."""
    config = level(Level.A)
    with infra.small_disk(tmp_path / "disk", "4m") as disk, infra.store_at(disk) as store:
        filler = []
        full = script('?nap {"seconds": 0}', "done" + " " * 300_000 + "really")
        with pytest.raises(LedgerError, match="disk is full; free space"):
            infra.run(
                store,
                full,
                None,
                infra.BUNDLE,
                config,
                lambda session: filler.append(infra.fill_up(disk)),
                limits={"max_tokens": 400_000, "max_tokens_per_turn": 400_000},
            )
        assert store.counts() == {"running": 1} and not store.load_trajectories("train", 0)
        (path,) = filler
        path.unlink()
        infra.run(store, script(DONE), None, infra.BUNDLE, config)
        played = infra.judged(store, tmp_path)
    assert played.outcomes == [Outcome.COMPLETED] and played.correctness == [1.0]
    assert played.attempts == 2 and played.failures == {}


def test_a_proxy_that_is_killed(tmp_path: Path, api: ApiServer):
    """The node's proxy dies with the episode open; each further attempt finds none."""
    (tmp_path / "proxy.toml").write_text(f'state_dir = "{tmp_path}/node"\n')
    proxy = subprocess.Popen(
        [sys.executable, "-m", "sandbox.proxy", "--config", str(tmp_path / "proxy.toml")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert proxy.stdout is not None and proxy.stdout.readline().startswith("ready ")
        loaded = load_task(proxied_tasks.simulated(tmp_path / "task"))
        played = infra.play(
            tmp_path,
            script('?take {"name": "bolt", "count": 1}', proxied_tasks.ANSWER),
            task=loaded.spec,
            bundle=loaded.bundle,
            config=proxied_tasks.config(proxy_socket=tmp_path / "node" / "control.sock"),
            broken=lambda session: proxy.kill() or (proxy.wait() and None),
        )
    finally:
        proxy.kill()
        proxy.wait()
        assert proxy.stdout is not None
        proxy.stdout.close()
    infra.assert_nobodys_reward(played, "proxy")
    assert played.attempts == 3 and "ProxyLost" in str(played.errors[0])


def test_filling_its_own_disk_is_the_policys_doing(tmp_path: Path):
    """The quota of the box: an error the tool's caller reads, a wrong answer, a reward."""
    policy = script('?fill {"name": "a"}', '?fill {"name": "b"}', "no room")
    infra.assert_the_policys(infra.play(tmp_path, policy, config=level(Level.A)))


def test_asking_for_what_is_not_there_is_the_policys_doing(tmp_path: Path, api: ApiServer):
    """404 is an answer."""
    loaded = load_task(proxied_tasks.api_task(tmp_path / "task", api, mode="live"))
    turns = [f'?status {{"code": "{code}"}}' for code in (404, 400, 403)]
    played = infra.play(
        tmp_path,
        script(*turns, "not found"),
        task=loaded.spec,
        bundle=loaded.bundle,
        config=live(tmp_path, api),
    )
    infra.assert_the_policys(played)


def full_disk() -> Exception:
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RuntimeError("cannot write") from error
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ContextLost("gone"), Failure.ENGINE),
        (CapacityError("full"), Failure.ENGINE),
        (StaleWeights("other weights"), Failure.ENGINE),
        (WaitTimeout("e", "engine.forward_step", 1.0), Failure.ENGINE),
        (WaitTimeout("e", "sandbox.call", 1.0), Failure.SANDBOX),
        (WaitTimeout("e", "its 2 groups", 1.0), Failure.INTERNAL),
        (SandboxLost("died"), Failure.SANDBOX),
        (SandboxError("no box came free"), Failure.SANDBOX),
        (ProxyLost("no answer"), Failure.PROXY),
        (full_disk(), Failure.DISK),
        (KeyError("bug"), Failure.INTERNAL),
    ],
)
def test_kinds(error: Exception, kind: Failure):
    """By the part that would have to be repaired."""
    assert failure_of(error) is kind
