"""What `ray job submit` prints (captured from Ray 2.60) becomes one line; and the token's place."""

from pathlib import Path

import pytest

from infra.cluster.auth import auth_env
from infra.cluster.joboutput import JobOutput, client_cause
from infra.errors import ConfigError

STAMP = "2026-11-30 05:55:56,004"
HEAD = f"""\
{STAMP}\tINFO cli.py:42 -- \x1b[37mJob submission server address\x1b[39m: http://127.0.0.1:8555
{STAMP}\tSUCC cli.py:66 -- -------------------------------------
{STAMP}\tSUCC cli.py:67 -- \x1b[32mJob 'id-1' submitted successfully\x1b[39m
{STAMP}\tSUCC cli.py:68 -- -------------------------------------
{STAMP}\tINFO cli.py:330 -- Next steps
{STAMP}\tINFO cli.py:351 -- Tailing logs until the job exits (disable with --no-wait):
{STAMP}\tINFO job_manager.py:581 -- Runtime env is setting up.
Running entrypoint for job id-1: python x.py
"""
SUCCEEDED = f"{STAMP}\tSUCC cli.py:67 -- Job 'id-1' succeeded\n"
STOPPED = f"{STAMP}\tWARN cli.py:71 -- Job 'id-1' was stopped\n"
FAILED = f"""\
{STAMP}\tERR cli.py:74 -- ------------------
{STAMP}\tERR cli.py:75 -- Job 'id-1' failed
{STAMP}\tERR cli.py:76 -- ------------------
"""
EXIT_2 = (
    f"{STAMP}\tINFO cli.py:89 -- Status message: Job entrypoint command failed with exit code 2, "
    "last available logs (truncated to 20,000 chars):\nabout to fail\n"
)


def feed(text: str) -> tuple[JobOutput, list[str]]:
    output = JobOutput()
    lines = [output.feed(line) for line in text.splitlines()]
    return output, [line for line in lines if line is not None]


def test_only_the_jobs_lines_are_passed_on() -> None:
    """Client chatter before, the verdict and the repeated log after it are left out."""
    output, lines = feed(HEAD + "hello 1\n\x1b[1mbold\x1b[0m\n" + SUCCEEDED)
    assert lines[-3:] == ["Running entrypoint for job id-1: python x.py", "hello 1", "bold"]
    assert (output.accepted, output.submission_id, output.status) == (True, "id-1", "succeeded")


@pytest.mark.parametrize(
    "log, cause",
    [
        ("about to fail\nparl: x is wrong\n", "parl: x is wrong"),
        ("Traceback ...\n  File 'x'\nValueError: no\n(raylet, pid=3) gone\n", "ValueError: no"),
        ("something\n\n", "something"),
        (
            "ray.exceptions.RayTaskError(OSError): full\nbye\n",
            "ray.exceptions.RayTaskError(OSError)",
        ),
    ],
)
def test_failed_job_gives_its_error_line(log: str, cause: str) -> None:
    """Exit code and the last line that looks like an error, else the last line at all."""
    output, _ = feed(HEAD + log + FAILED + EXIT_2)
    assert output.cause().startswith(f"job id-1 failed with exit code 2: {cause}")


def test_failure_before_the_command_gives_the_status_message() -> None:
    """A runtime environment that cannot be made has no log, only a message."""
    message = (
        f"{STAMP}\tINFO cli.py:89 -- Status message: runtime_env setup failed: no wheel\nmore\n"
    )
    output, _ = feed(HEAD + FAILED + message)
    assert output.cause() == "job id-1 failed: runtime_env setup failed: no wheel"


def test_stopped_is_not_success() -> None:
    """Ray exits 0 for a stopped job; we do not."""
    output, _ = feed(HEAD + STOPPED)
    assert output.cause() == "job id-1 was stopped before it ended"


@pytest.mark.parametrize(
    "errors, expected",
    [
        ("ConnectionError: Failed to connect to Ray at address: X.", "no Ray head node answers at"),
        (
            "ray.exceptions.AuthenticationError: Authentication required: Unauthorized: Missing",
            "wants a token (401); set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH",
        ),
        (
            "ray.exceptions.AuthenticationError: Authentication failed: Forbidden: Invalid",
            "refuses our token (403); set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH",
        ),
        (
            "ValueError: Job with submission_id id-1 already exists. Please use ...\n.\n",
            "submission id 'id-1' was used before",
        ),
        ("Traceback\nOSError: broken pipe\n", "job id-1: lost contact: OSError: broken pipe"),
    ],
)
def test_client_failures(errors: str, expected: str) -> None:
    """Each known failure says what to do."""
    cause = client_cause(errors, "http://h:1", "id-1")
    assert expected in cause and "\n" not in cause


def test_token_is_found_in_order(tmp_path: Path) -> None:
    """The setting, then the environment, then Ray's default file, then none."""
    default, other = tmp_path / ".ray" / "auth_token", tmp_path / "token"
    default.parent.mkdir()
    for path in (default, other):
        path.write_text("t")
    home = {"HOME": str(tmp_path)}
    by_default = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(default)}
    by_path = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(other)}
    assert auth_env("", home) == by_default
    assert auth_env("", {**home, "RAY_AUTH_TOKEN_PATH": str(other)}) == by_path
    assert auth_env(str(other), {**home, "RAY_AUTH_TOKEN_PATH": "x"}) == by_path
    assert auth_env("", {**home, "RAY_AUTH_TOKEN": "t"}) == {"RAY_AUTH_MODE": "token"}
    assert auth_env("", {**home, "RAY_AUTH_MODE": "disabled"}) == {}
    assert auth_env("", {"HOME": str(tmp_path / "none")}) == {}


def test_missing_token_file_is_named(tmp_path: Path) -> None:
    """A path that was given must exist."""
    with pytest.raises(ConfigError, match=r"RAY_AUTH_TOKEN_PATH .*/none: no such file; set RAY_"):
        auth_env("", {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")})
