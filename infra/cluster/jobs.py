"""Ray Jobs: run a command on a cluster through `ray job submit`, with one line when it fails.

The command line and not the SDK, because its client process can be killed and its authentication
is set by environment alone. What it prints is its only interface; ``JobOutput`` reads it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.cluster.auth import auth_env
from infra.cluster.joboutput import JobOutput, client_cause
from infra.errors import ConfigError

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
RAY = (sys.executable, "-m", "ray.scripts.scripts")


@dataclass(frozen=True, slots=True)
class JobResult:
    """``exit_code`` 0 or 1; ``cause`` is one line and empty on success."""

    submission_id: str
    exit_code: int
    cause: str


def submit(
    entrypoint: Sequence[str],
    *,
    working_dir: Path | None = None,
    address: str = "",
    env_vars: Mapping[str, str] | None = None,
    wait: bool = True,
    submission_id: str = "",
    auth_token_path: str = "",
    timeout_s: float | None = None,
) -> int:
    """``run_job`` for a terminal: the job's lines on stdout, the cause of a failure on stderr."""
    result = run_job(
        entrypoint,
        working_dir=working_dir,
        address=address,
        env_vars=env_vars,
        wait=wait,
        submission_id=submission_id,
        auth_token_path=auth_token_path,
        timeout_s=timeout_s,
        on_line=_to_stdout,
        on_interrupt=tell_interrupted,
    )
    if result.cause:
        sys.stderr.write(f"parl: {result.cause.removeprefix('parl: ')}\n")
    return result.exit_code


def run_job(
    entrypoint: Sequence[str],
    *,
    working_dir: Path | None = None,
    address: str = "",
    env_vars: Mapping[str, str] | None = None,
    wait: bool = True,
    submission_id: str = "",
    auth_token_path: str = "",
    timeout_s: float | None = None,
    on_line: Callable[[str], None] = lambda line: None,
    on_interrupt: Callable[[str, str], None] = lambda name, address: None,
) -> JobResult:
    """Run ``entrypoint`` on the cluster whose dashboard is at ``address``.

    address: http://host:port; empty = RAY_API_SERVER_ADDRESS, else port 8265 of this machine.
    working_dir is uploaded without what its .gitignore names and becomes the job's folder.
    wait=False returns as soon as the job is accepted. ``timeout_s`` bounds the whole wait; then
    the job is stopped. ``on_line`` gets each log line of the job without its line end. Ctrl-C ends
    the wait alone: ``on_interrupt(submission id, address)`` is called and KeyboardInterrupt passes.
    ConfigError: no entrypoint, no such folder or token file. Everything else is in the result.
    """
    if not entrypoint:
        raise ConfigError("no command to submit; expected one, like python train.py")
    if working_dir is not None and not working_dir.is_dir():
        raise ConfigError(f"working_dir {working_dir}: no such folder to upload")
    address = _http_address(address or os.environ.get("RAY_API_SERVER_ADDRESS", DEFAULT_ADDRESS))
    command = [*RAY, "job", "submit", "--address", address, "--log-color", "false"]
    command += ["--runtime-env-json", json.dumps({"env_vars": dict(env_vars or {})})]
    if working_dir is not None:
        command += ["--working-dir", str(working_dir)]
    if submission_id:
        command += ["--submission-id", submission_id]
    if not wait:
        command.append("--no-wait")
    command += ["--", *entrypoint]
    environ = {**os.environ, **auth_env(auth_token_path), "PYTHONUNBUFFERED": "1"}
    output = JobOutput()
    try:
        errors, timed_out = _stream(command, environ, timeout_s, on_line, output)
    except KeyboardInterrupt:
        on_interrupt(output.submission_id or submission_id, address)
        raise
    name = output.submission_id or submission_id
    if timed_out:
        if name:
            stop_job(name, address=address, auth_token_path=auth_token_path)
        return JobResult(name, 1, f"job {name} did not end in {timeout_s:g} s and was stopped")
    if output.accepted and not wait:
        return JobResult(name, 0, "")
    if output.status == "succeeded":
        return JobResult(name, 0, "")
    cause = output.cause() if output.status else client_cause(errors, address, name)
    return JobResult(name, 1, cause)


def stop_job(submission_id: str, *, address: str = "", auth_token_path: str = "") -> None:
    """Ask the cluster to end a job; returns when it took the request, ended or not."""
    address = _http_address(address or os.environ.get("RAY_API_SERVER_ADDRESS", DEFAULT_ADDRESS))
    subprocess.run(
        [*RAY, "job", "stop", "--no-wait", "--address", address, submission_id],
        env={**os.environ, **auth_env(auth_token_path)},
        capture_output=True,
        timeout=60,
        check=False,
    )


def _stream(
    command: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float | None,
    on_line: Callable[[str], None],
    output: JobOutput,
) -> tuple[str, bool]:
    """Run the client, ``output`` reads its stdout; its stderr (raw), and whether time was up."""
    expired = threading.Event()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
        )

        def expire() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(timeout_s, expire) if timeout_s is not None else None
        if timer is not None:
            timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                text = output.feed(line.rstrip("\n"))
                if text is not None:
                    on_line(text)
            process.wait()
        finally:
            if timer is not None:
                timer.cancel()
            if process.poll() is None:  # Ctrl-C: the job goes on, its client does not
                process.kill()
                process.wait()
        errors.seek(0)
        return errors.read(), expired.is_set()


def _http_address(address: str) -> str:
    return address if "://" in address else f"http://{address}"


def _to_stdout(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def tell_interrupted(name: str, address: str) -> None:
    """The job outlives the one who watched it: say so, and how to watch or end it."""
    if not name:
        sys.stderr.write(
            f"interrupted before the cluster named a job; see: ray job list --address {address}\n"
        )
        return
    sys.stderr.write(
        f"interrupted; job {name} goes on. Follow it: ray job logs -f --address {address} {name}; "
        f"end it: ray job stop --address {address} {name}\n"
    )
