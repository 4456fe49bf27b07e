"""Bad input through the real command: one clear line, exit 1 or 2, nothing lost.

Each test runs ``parl`` in a process of its own on a run without any training step.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)  # a busy CI box starts torch in tens of seconds
ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "test.toml"
EMPTY_RUN = (
    "backend=local",
    "rounds.num_rounds=0",
    "rounds.eval_episodes=0",
    "warm_start.clean_steps=0",
    "warm_start.num_demonstrations=1",
    "sandbox.pool_size=1",
)
"""Everything is built, one checkpoint and one weight version are committed, nothing is learnt."""
SHORT_RUN = ("rounds.num_rounds=3", "rollout.num_prompts=2", "sandbox.pool_size=4")


def parl(*words: str | Path, env: dict[str, str] | None = None):
    """The command as a user types it."""
    return subprocess.run(
        [sys.executable, "-m", "parl.cli.main", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=240,
    )


def run(runs: Path, *overrides: str, config: Path = CONFIG, **process):
    words = [word for value in (f"run.dir={runs}", *overrides) for word in ("--set", value)]
    return parl("rl", "run", "--config", config, *words, **process)


def assert_refused(done, code: int, *said: str) -> None:
    """Exit code, one line on stderr (log lines aside), and what the line must say."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("parl: ")]
    assert done.returncode == code, done.stderr + done.stdout
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    for piece in said:
        assert piece in lines[0], lines[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished empty run."""
    runs = tmp_path_factory.mktemp("runs")
    done = run(runs, *EMPTY_RUN)
    assert done.returncode == 0, done.stderr
    return runs / "test-001"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tasks.family=lookup_calk", "did you mean 'lookup_calc'"),
        ("tasks.mix={lookup=1, ad=1}", "tasks.mix names ad"),
        ("rounds.num_round=3", "did you mean num_rounds?"),
        ("rollout.temperature=-1", "rollout.temperature = -1"),
        ("model.vocab_size=100", "make 291"),
        ("rounds.advantage=zzz", "expected one of group_mean, group_std"),
        ("rollout.episode_timeout_s=-5", "rollout.episode_timeout_s = -5"),
        ("rollout.temperature=inf", "expected a finite number"),
        ("tasks.mix={lookup=inf}", "tasks.mix"),
        ("tasks.min_tokens={nope=5}", "no such task type; it has "),
        ("ray.num_cpus=0", "ray.num_cpus = 0"),
        ("sandbox.proxy_file=nowhere.toml", "no such file"),
        ('chat.words=["user", "user"]', "chat.words: "),
        ("rounds=3", "--set rounds=3: "),
        ("run.ledger=postgresql://u@h:abc/x", "is not a URL"),
    ],
)
def test_a_wrong_value_starts_nothing(tmp_path, override, said):
    """Unknown task, type or key, value out of range: exit 2 before a folder is made."""
    assert_refused(run(tmp_path / "runs", override), 2, said)
    assert not (tmp_path / "runs").exists()


def test_bad_toml_names_line_and_column(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text("[rounds]\nnum_rounds = = 3\n")
    assert_refused(run(tmp_path / "runs", config=bad), 2, "bad.toml:2:", "not TOML")


def test_a_ledger_on_a_full_disk_starts_nothing(tmp_path, disk):
    """The cause is the disk; no half-made run stays behind."""
    folder = disk("64k")
    (folder / "filler").write_bytes(b"x" * 60_000)
    done = run(tmp_path / "runs", f"run.ledger=sqlite:///{folder}/ledger.db", *EMPTY_RUN)
    assert_refused(done, 1, "ledger", "the disk")
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "free"),
    [("run.dir={}", 300_000), ("run.ledger=sqlite:///{}/ledger.db", 120_000)],
    ids=["run folder", "ledger"],
)
def test_a_disk_that_fills_up_stops_the_run_and_loses_nothing(tmp_path, disk, place, free):
    """One line, exit 1; once there is room again the run is resumed to its end."""
    folder = disk("64m")
    runs = folder if place.startswith("run.dir") else tmp_path / "runs"
    with socket.create_server(("127.0.0.1", 0)) as server:
        # an occupied port stops the run as soon as folder and ledger exist
        port = f"run.metrics_port={server.getsockname()[1]}"
        done = run(runs, *EMPTY_RUN, *SHORT_RUN, place.format(folder), port)
    assert done.returncode == 2, done.stderr
    filler = folder / "filler"
    filler.write_bytes(b"x" * (os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize - free))
    stopped = parl("rl", "resume", runs / "test-001")
    assert_refused(stopped, 1, str(folder))
    assert "stopped by an error; resume with: parl rl resume" in stopped.stdout
    filler.unlink()
    resumed = parl("rl", "resume", runs / "test-001")
    assert resumed.returncode == 0, resumed.stderr
    status = parl("rl", "status", runs / "test-001")
    assert status.stdout.startswith("run test-001: finished, 3/3 rounds")


def test_an_occupied_metrics_port_is_named(tmp_path):
    """Exit 2 and the way to go on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = run(tmp_path, f"run.metrics_port={port}", *EMPTY_RUN)
    assert_refused(done, 2, str(port))
    assert f"resume with: parl rl resume {tmp_path / 'test-001'}" in done.stdout


def test_without_bubblewrap_nothing_runs_unisolated(tmp_path):
    """No level is taken silently; the message names the remedy."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "git", "setpriv"):
        found = shutil.which(name)
        if found is not None:
            (tools / name).symlink_to(found)
    done = run(tmp_path / "runs", *EMPTY_RUN, env={"PATH": str(tools)})
    assert_refused(done, 1, "bwrap", "bubblewrap")


def test_a_renamed_folder_is_told_its_name(finished, tmp_path):
    """The ledger knows the run by the old name; no command may half work."""
    other = tmp_path / "other"
    shutil.copytree(finished, other)
    for verb in ("status", "resume", "rescore", "report"):
        done = parl("rl", verb, other)
        assert_refused(done, 1, f"holds {finished.name} and no run 'other'", "rename the folder")


def test_an_edited_config_does_not_go_on(finished, tmp_path):
    """What the ledger tells of a run is true of all its rounds. Where it runs may change."""
    copy = tmp_path / finished.name
    shutil.copytree(finished, copy)
    file = copy / "config.toml"
    assert file.stat().st_mode & 0o077 == 0
    text = file.read_text()
    file.write_text(text.replace("violation = 1.0", "violation = 0.5"))
    done = parl("rl", "resume", copy)
    assert_refused(done, 2, "was edited", "reward.violation: 1.0 -> 0.5", "put it back")
    assert "finished" in parl("rl", "status", copy).stdout
    file.write_text(text.replace("num_runners = ", "num_runners = 1"))
    assert parl("rl", "resume", copy).returncode == 0


def test_a_finished_run_stays_finished(finished, tmp_path):
    """A report that cannot be written does not undo the rounds."""
    copy = tmp_path / finished.name
    shutil.copytree(finished, copy)
    shutil.rmtree(copy / "checkpoints")
    assert_refused(parl("rl", "resume", copy), 2, "checkpoint")
    assert "finished" in parl("rl", "status", copy).stdout


def test_a_password_is_not_shown():
    """Neither by --dry-run nor in the line about a URL that nothing can read."""
    words = ["rl", "run", "--config", CONFIG, "--dry-run", "--set"]
    done = parl(*words, "run.ledger=postgresql://me:geheim@host/db")
    assert done.returncode == 0 and "me:***@host/db" in done.stdout
    done = parl(*words[:-2], "--set", "run.ledger=postgresql://me:geheim@host:x/db")
    assert_refused(done, 2, "host:x/db", "expected sqlite:///PATH")
    assert "geheim" not in done.stderr


def test_rescore_of_nothing_is_not_success(finished):
    """A run without a committed round has no reward to compare."""
    assert_refused(parl("rl", "rescore", finished), 1, "has no committed round yet")


def test_no_folder_of_runs(tmp_path):
    """A mistyped --dir is not an empty list."""
    assert_refused(parl("rl", "list", "--dir", tmp_path / "nowhere"), 2, "no such folder")
    assert parl("rl", "list", "--dir", tmp_path).stdout.startswith("no runs in ")


@pytest.mark.slow
def test_a_wrong_checkpoint_is_refused_and_nothing_is_lost(finished):
    """A flipped byte, then a missing folder: exit 2 and its name; put back, the run resumes."""
    checkpoint = next((finished / "checkpoints").glob("sft-*"))
    victim = max((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    original = victim.read_bytes()
    victim.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    assert_refused(parl("rl", "resume", finished), 2, f"checkpoint {checkpoint}", "hash")
    victim.write_bytes(original)
    aside = checkpoint.rename(finished / "aside")
    assert_refused(parl("rl", "resume", finished), 2, f"checkpoint {checkpoint} is missing")
    aside.rename(checkpoint)
    assert parl("rl", "resume", finished).returncode == 0


@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[[str], Path]]:
    """Makes a file system of a given size; needs root (mount)."""
    mounted: list[Path] = []

    def make(size: str) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
            pytest.skip("cannot mount a tmpfs here")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)
