"""The guardian reaps what a dead owner left and nothing that was taken back."""

import json
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from sandbox.guardian import Guardian, reap_all
from sandbox.reaper import process_host


def footprint(directory: Path) -> dict[str, Any]:
    """A box that is only a folder."""
    directory.mkdir(exist_ok=True)
    return {
        "box_id": secrets.token_hex(8),
        "host": process_host(),
        "process": None,
        "cgroups": [],
        "directories": [str(directory)],
    }


def test_an_orderly_end_reaps_what_was_not_forgotten(tmp_path: Path):
    """A forgotten box is gone already; the other one's folder is removed."""
    guardian = Guardian()
    guardian.watch("kept", footprint(tmp_path / "kept"))
    guardian.watch("left", footprint(tmp_path / "left"))
    guardian.forget("kept")
    guardian.forget("never seen")
    guardian.close()
    assert (tmp_path / "kept").exists() and not (tmp_path / "left").exists()
    guardian.close()


def test_a_killed_guardian_is_replaced_and_told_everything(tmp_path: Path):
    """By the next box that is watched."""
    guardian = Guardian()
    guardian.watch("first", footprint(tmp_path / "first"))
    assert guardian._process is not None
    guardian._process.kill()
    guardian._process.wait()
    guardian.forget("nothing")
    guardian.watch("second", footprint(tmp_path / "second"))
    guardian.close()
    assert not (tmp_path / "first").exists() and not (tmp_path / "second").exists()


def test_it_outlives_a_killed_owner_and_its_process_group(tmp_path: Path):
    """SIGKILL of the whole group of the owner."""
    data = footprint(tmp_path / "box")
    program = textwrap.dedent(
        """
        import json, sys, time
        from sandbox.guardian import Guardian
        guardian = Guardian()
        guardian.watch("box", json.loads(sys.argv[1]))
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(data)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
    os.killpg(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 10
    while (tmp_path / "box").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not (tmp_path / "box").exists()


def test_the_folder_of_a_proxy_in_process_ends_with_its_owner(tmp_path: Path):
    """Audit log and journal of a pool whose process was killed; its simulator's folder too."""
    program = textwrap.dedent(
        """
        import asyncio, pathlib, sys
        from sandbox.pool import SandboxPool
        from sandbox.fakes import MemoryLeases
        from sandbox.task import load_task
        from tests.sandbox import proxied_tasks as tasks

        folder = tasks.simulated(pathlib.Path(sys.argv[1]) / "task")

        async def main():
            loaded = load_task(folder)
            settings = tasks.config(unsafe_local=True)
            pool = SandboxPool(loaded.bundle, size=1, leases=MemoryLeases(), config=settings)
            session = await pool.acquire(loaded.spec)
            await tasks.play(session, tasks.raw("take", name="bolt", count=1))
            print("ready", flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == b"ready\n"
        kinds = {path.name.rpartition("-")[0] for path in temporary.iterdir()}
        assert kinds == {"parl-proxy", "parl-guard"}
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    deadline = time.monotonic() + 10
    while any(temporary.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(temporary.iterdir())


def test_one_that_cannot_be_reaped_does_not_stop_the_others(tmp_path: Path):
    """The error is raised at the end."""
    elsewhere = footprint(tmp_path / "elsewhere") | {"host": "another machine"}
    here = footprint(tmp_path / "here")
    with pytest.raises(RuntimeError, match="lives on another machine"):
        reap_all([elsewhere, here])
    assert (tmp_path / "elsewhere").exists() and not (tmp_path / "here").exists()
