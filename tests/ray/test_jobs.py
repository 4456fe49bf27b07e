"""Ray Jobs on a real head node with a token of its own."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.cluster.config import ClusterConfig
from infra.cluster.head import HeadNode, start_head
from infra.cluster.jobs import JobResult, run_job, stop_job, submit, tell_interrupted
from infra.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]

GOOD = """
import os, ray
ray.init()
print("cpus", int(ray.cluster_resources()["CPU"]), "word", os.environ["WORD"])
"""
BAD = """
import sys
print("about to fail")
sys.exit("parl: mix = 3: expected a table")
"""


@pytest.fixture(scope="module")
def head() -> Iterator[HeadNode]:
    with start_head(num_cpus=2) as head:
        yield head


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "good.py").write_text(GOOD)
    (folder / "bad.py").write_text(BAD)
    return folder


def run(head: HeadNode, *entrypoint: str, lines: list[str] | None = None, **options) -> JobResult:
    return run_job(
        [sys.executable, *entrypoint],
        address=head.jobs_address,
        auth_token_path=options.pop("auth_token_path", str(head.token_path)),
        on_line=(lines if lines is not None else []).append,
        **options,
    )


def test_job_that_succeeds(head: HeadNode, folder: Path) -> None:
    """Its folder, its environment and its lines arrive; a used id is refused."""
    lines: list[str] = []
    options = {"working_dir": folder, "submission_id": "good-1"}
    result = run(head, "good.py", lines=lines, env_vars={"WORD": "x"}, **options)
    assert result == JobResult("good-1", 0, "")
    assert "cpus 2 word x" in lines
    again = run(head, "good.py", **options)
    assert again.exit_code == 1
    assert "submission id 'good-1' was used before" in again.cause


def test_job_that_fails(head: HeadNode, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, the job's lines on stdout and one line with its cause on stderr."""
    code = submit(
        [sys.executable, "bad.py"],
        working_dir=folder,
        address=head.jobs_address,
        auth_token_path=str(head.token_path),
        submission_id="bad-1",
    )
    out, err = capsys.readouterr()
    assert code == 1
    assert "about to fail" in out.splitlines()
    assert err == "parl: job bad-1 failed with exit code 1: parl: mix = 3: expected a table\n"


def test_job_that_takes_too_long(head: HeadNode) -> None:
    """It is stopped at the deadline."""
    result = run(head, "-c", "import time; time.sleep(600)", timeout_s=12, submission_id="long-1")
    assert result.cause == "job long-1 did not end in 12 s and was stopped"


def test_ctrl_c_leaves_the_job(head: HeadNode, capsys: pytest.CaptureFixture[str]) -> None:
    """Who watches may go; how to come back and how to end it is said."""

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    told: list[tuple[str, str]] = []
    with pytest.raises(KeyboardInterrupt):
        run_job(
            [sys.executable, "-c", "import time; print('going on', flush=True); time.sleep(600)"],
            address=head.jobs_address,
            auth_token_path=str(head.token_path),
            submission_id="watched-1",
            on_line=interrupt,
            on_interrupt=lambda name, address: told.append((name, address)),
        )
    assert told == [("watched-1", head.jobs_address)]
    tell_interrupted(*told[0])
    assert f"ray job stop --address {head.jobs_address} watched-1" in capsys.readouterr().err
    stop_job("watched-1", address=head.jobs_address, auth_token_path=str(head.token_path))
    again = run(head, "-c", "pass", submission_id="watched-1")
    assert "was used before" in again.cause


def test_without_the_token(head: HeadNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token and a wrong token both say which variable to set."""
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    result = run(head, "-c", "pass", auth_token_path=str(wrong))
    assert result.exit_code == 1
    assert "refuses our token (403); set RAY_AUTH_MODE=token" in result.cause
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    result = run(head, "-c", "pass", auth_token_path="")
    assert "wants a token (401); set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH" in result.cause


def test_nobody_at_the_address() -> None:
    """A refused connection gives the address and how to start a head node."""
    result = run_job(["true"], address=f"http://127.0.0.1:{free_port()}")
    assert result.exit_code == 1
    assert "no Ray head node answers at http://127.0.0.1:" in result.cause
    assert "ray start --head" in result.cause


def test_driver_connects_with_the_token(head: HeadNode) -> None:
    """connect() reaches the head node with the settings it reports (in a process of its own,
    because Ray reads its token once)."""
    import subprocess

    config = ClusterConfig(address=head.gcs_address, auth_token_path=str(head.token_path))
    code = f"""
from infra.cluster.config import ClusterConfig
from infra.cluster.connect import connect
handle = connect(ClusterConfig.model_validate_json({config.model_dump_json()!r}))
print(handle.is_local, handle.resources["CPU"])
handle.shutdown()
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["False", "2.0"], done.stderr


def test_stop_ends_every_process_of_the_head() -> None:
    """Daemons, workers and the driver of a running job are gone; the folder too."""
    head = start_head(num_cpus=1)
    accepted = run(head, "-c", "import time; time.sleep(600)", wait=False)
    assert accepted.exit_code == 0 and accepted.submission_id.startswith("raysubmit_")
    assert len(head.pids()) > 3
    head.stop()
    head.stop()
    assert head.pids() == []
    assert not head.folder.exists()
