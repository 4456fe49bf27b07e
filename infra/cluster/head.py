"""A head node of our own on this machine, beside any other Ray that runs there.

with start_head(num_cpus=2) as head:
    submit(["python", "train.py"], address=head.jobs_address,
           auth_token_path=str(head.token_path))
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from infra.cluster.auth import MODE, TOKEN, TOKEN_PATH
from infra.cluster.jobs import RAY
from infra.errors import ClusterError
from infra.ports import free_port
from infra.processes import marked_with

_MARK = "PARL_HEAD_ID"
"""In the environment of every process the head starts, so that stop() knows its own."""
_STOP_S = 20.0


@dataclass(slots=True)
class HeadNode:
    """A running head node; ``stop`` ends its processes and no others."""

    folder: Path
    """Token, log and Ray's session folder; removed by ``stop``."""
    process: subprocess.Popen[bytes]
    jobs_address: str
    """Dashboard, the address for `ray job submit`."""
    token_path: Path
    mark: str
    gcs_address: str = ""
    """host:port for ``ClusterConfig.address``."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables a client needs."""

    def __enter__(self) -> HeadNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the head node: SIGTERM, then SIGKILL for what is left. Twice is fine."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself
        shutil.rmtree(self.folder, ignore_errors=True)

    def pids(self) -> list[int]:
        """Processes of this head node that run now (daemons, workers, job drivers)."""
        return marked_with(_MARK, [self.mark])


def start_head(
    *, num_cpus: int = 2, timeout_s: float = 90.0, env: dict[str, str] | None = None
) -> HeadNode:
    """Start `ray start --head` on free ports with a fresh token; returns when it takes jobs.

    ``env`` is added to the environment of the node and so of its jobs. ClusterError when it ends
    or does not answer in time; the message has the last line it wrote.
    """
    # the path of a unix socket may have 107 bytes, so directly below the temporary folder
    folder = Path(tempfile.mkdtemp(prefix="parl-ray-"))
    token_path = folder / "auth_token"
    token_path.touch(mode=0o600)
    token_path.write_text(secrets.token_hex(32))
    mark = secrets.token_hex(8)
    client_env = {MODE: "token", TOKEN_PATH: str(token_path)}
    environ = {**os.environ, **(env or {}), **client_env, _MARK: mark}
    environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for name in (TOKEN, "RAY_ADDRESS"):
        environ.pop(name, None)
    port, dashboard_port = free_port(), free_port()
    command = [*RAY, "start", "--head", "--block", f"--num-cpus={num_cpus}"]
    command += [f"--port={port}", f"--dashboard-port={dashboard_port}"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-agent-listen-port={free_port()}"]
    command += [f"--ray-client-server-port={free_port()}", f"--temp-dir={folder / 'ray'}"]
    with (folder / "head.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environ, stdout=log, stderr=log, start_new_session=True
        )
    head = HeadNode(
        folder, process, f"http://127.0.0.1:{dashboard_port}", token_path, mark, env=client_env
    )
    try:
        _wait_until_ready(head, timeout_s)
        head.gcs_address = _address_file(head).read_text().strip()
    except BaseException:
        head.stop()
        raise
    return head


def _wait_until_ready(head: HeadNode, timeout_s: float) -> None:
    token = head.token_path.read_text()
    request = urllib.request.Request(
        f"{head.jobs_address}/api/version", headers={"Authorization": f"Bearer {token}"}
    )
    deadline = time.monotonic() + timeout_s
    problem = ""
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5):
                # the dashboard answers a little before `ray start` has written its address
                if _address_file(head).is_file():
                    return
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            problem = f" ({error})"
        lines = (head.folder / "head.log").read_text(errors="replace").splitlines() or [""]
        if head.process.poll() is not None:
            raise ClusterError(
                f"the head node ended with code {head.process.returncode}: {lines[-1]}"
            )
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the head node was not ready at {head.jobs_address} in {timeout_s:g} s{problem}; "
                f"its last line: {lines[-1]}"
            )
        time.sleep(0.2)


def _address_file(head: HeadNode) -> Path:
    return head.folder / "ray" / "ray_current_cluster"
