"""The gVisor backend: the contract where runsc is present, one clear reason where it is not."""

import asyncio
import secrets
from pathlib import Path

import pytest

from sandbox.backends.base import Level, PooledBox
from sandbox.backends.choice import open_backend
from sandbox.backends.ray import find_runsc, reap_sandbox
from sandbox.config import SandboxConfig
from sandbox.errors import BackendUnavailable
from tests.sandbox.conftest import CONFIG, RunInBox
from tests.sandbox.test_boxes import SOURCE, call, start


def script(directory: Path, text: str) -> None:
    """An executable runsc."""
    (directory / "runsc").write_text(f"#!/bin/sh\n{text}\n")
    (directory / "runsc").chmod(0o755)


def test_no_runsc_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """What is missing on this node."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailable, match=r"runsc .* is not installed") as caught:
        open_backend(Level.GVISOR, CONFIG)
    assert "\n" not in str(caught.value)


def test_an_old_runsc_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Debian 12's: Ray mounts EROFS images, which it does not know."""
    script(tmp_path, "echo runsc version 0.0~20221219.0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(BackendUnavailable, match=r"20221219.* too old"):
        find_runsc()


def test_the_reaper_deletes_only_the_sandbox_that_names_the_box(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """By the marker in the bundle Ray wrote; another box's bundle stays."""
    log = tmp_path / "calls"
    script(tmp_path, f'echo "$@" >> {log}')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, box in (("ray-sandbox-1", "mine"), ("ray-sandbox-2", "other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"env": ["PARL_BOX={box}"]}}')
    reap_sandbox("mine", tmp_path)
    reap_sandbox("mine", tmp_path)
    assert log.read_text() == "--root /tmp/runsc delete -force ray-sandbox-1\n"
    assert not (tmp_path / "ray-sandbox-1").exists() and (tmp_path / "ray-sandbox-2").exists()


@pytest.mark.slow
def test_a_gvisor_box_answers_and_resets(in_box: RunInBox):
    """The heart of the contract, on a real gVisor."""

    async def body(box: PooledBox) -> None:
        await start(box)
        assert await call(box, "read", name="data.txt") == ("hello", None)
        assert await call(box, "soil") == ("soiled", None)
        assert await box.reset()
        assert box.enforced["network"] == "none"

    in_box(Level.GVISOR, SOURCE, body)


def test_a_pool_by_name_fails_closed():
    """Asked for gVisor, it never falls back to something weaker."""
    try:
        find_runsc()
    except BackendUnavailable as error:
        from sandbox.backends.choice import choose_backend

        with pytest.raises(BackendUnavailable) as caught:
            choose_backend(SandboxConfig(level="ray"))
        assert str(caught.value) == str(error)
    else:
        backend = open_backend(Level.GVISOR, SandboxConfig(level="ray"))
        assert asyncio.run(_opens(backend))


async def _opens(backend) -> bool:
    from sandbox.backends.program import BoxProgram

    box = await backend.open(secrets.token_hex(8), BoxProgram("tools.py", SOURCE))
    await box.kill()
    return True
