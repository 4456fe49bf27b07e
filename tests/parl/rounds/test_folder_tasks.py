"""Task folders as the tasks of a run: what is drawn, what is refused, a run of two rounds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import select

from infra.db.engine import open_ledger
from infra.db.models import EpisodeRow, RoundRow, TaskCertificateRow
from infra.errors import ConfigError
from parl.cli import main as cli
from parl.cli.runs import create_run
from parl.config import RunConfig
from parl.rounds.certified import require_certified
from parl.rounds.parts import RunParts, sandbox_config
from parl.store.store import Store
from sandbox.check.certificate import issue, write_certificate
from sandbox.check.findings import CheckReport, Step
from sandbox.check.folder_family import FolderFamily
from sandbox.check.keys import load_key
from sandbox.check.subject import content_hash
from sandbox.errors import TaskError
from sandbox.task import load_task
from sandbox.templates.new import write_task
from tests.parl.rounds.world import SETTINGS
from tests.sandbox.conftest import best_level


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def certify(folder: Path) -> None:
    """What a passed check writes."""
    report = CheckReport(str(folder), "n", "1", content_hash(folder), steps=[Step("oracle")])
    report.flake = {"repeat": 5}
    write_certificate(folder, issue(report, load_key()))


def config_of(root: Path, tmp_path: Path, **tasks: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            **SETTINGS,
            "backend": "local",
            "run": {"name": "folders", "seed": 7, "dir": str(tmp_path / "runs")},
            "tasks": {"family": f"folder:{root}", **tasks},
            "sandbox": {"pool_size": 2},
            "engine": {**SETTINGS["engine"], "max_context": 2048, "num_blocks": 1024},
            "rollout": {**SETTINGS["rollout"], "num_prompts": 2, "num_samples": 2},
            "warm_start": {**SETTINGS["warm_start"], "sloppy_steps": 0},
            "rounds": {"num_rounds": 2, "eval_episodes": 0, "checkpoint_every": 2},
        }
    )


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Six tasks that share their code and differ in instruction and memory."""
    root = tmp_path / "tasks"
    for number in range(6):
        folder = write_task(root / f"t{number}", f"acme/t{number}", "python")
        text = (folder / "task.toml").read_text().replace(f'task_type = "t{number}"',
                                                          'task_type = "stock"')  # fmt: skip
        (folder / "task.toml").write_text(
            text.replace("memory_mb = 256", f"memory_mb = {256 + number}")
        )
    return root


def test_every_task_is_drawn_before_any_comes_again(tasks: Path):
    """Each pass over the training tasks is a permutation; held-out ones never train."""
    family = FolderFamily(tasks)
    assert family.task_types == ("stock",)
    held = {family.instance(1, i, "heldout", "stock").name for i in range(12)}
    train = [family.instance(1, i, "train", "stock").name for i in range(24)]
    num = len(set(train))
    assert held | set(train) == {f"acme/t{i}" for i in range(6)} and not held & set(train)
    assert all(len(set(train[i : i + num])) == num for i in range(0, 24 - num, num))
    assert train == [FolderFamily(tasks).instance(1, i, "train", "stock").name for i in range(24)]
    spec = family.instance(1, 0, "train", "stock")
    assert spec.bundle == family.bundle.hash and spec.environment.memory_mib == 261
    assert family.oracle(spec).final_text == "3"


def test_tasks_of_different_code_or_none_are_refused(tasks: Path, tmp_path: Path):
    write_task(tasks / "other", "acme/other", "mcp")
    with pytest.raises(TaskError, match=r"differ from those of"):
        FolderFamily(tasks)
    with pytest.raises(TaskError, match=r"no task.toml here or one folder below"):
        FolderFamily(tmp_path / "config")


def test_boxes_are_as_large_as_the_largest_task_asks(tasks: Path, tmp_path: Path):
    config = config_of(tasks, tmp_path)
    assert sandbox_config(config).memory_mib == 261
    assert [spec.task_type for spec in RunParts.of(config).tasks.train(0)] == ["stock", "stock"]


def test_uncertified_tasks_start_nothing_unless_told(tasks: Path, tmp_path: Path):
    """The first folder without a certificate is named; allow_uncertified lets all pass."""
    with pytest.raises(TaskError, match=r"t0: has no certificate"):
        create_run(config_of(tasks, tmp_path))
    assert not (tmp_path / "runs").exists()
    for folder in sorted(tasks.iterdir()):
        certify(folder)
    assert len(require_certified(config_of(tasks, tmp_path))) == 6
    (tasks / "t3" / "instruction.md").write_text("Changed.\n")
    with pytest.raises(TaskError, match=r"t3: its certificate is for content"):
        require_certified(config_of(tasks, tmp_path))
    assert require_certified(config_of(tasks, tmp_path, allow_uncertified=True)) == []


def test_a_mix_of_unknown_types_is_refused(tasks: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"tasks.mix names lookup"):
        RunParts.of(config_of(tasks, tmp_path, mix={"lookup": 1.0}))


def test_a_run_maps_base_images_like_a_check_does():
    """Dockerfiles of task folders name images that this engine knows by other names."""
    section = {"level": "docker", "docker": {"base_images": {"python:3.12": "mirror/python:1"}}}
    config = RunConfig.model_validate({"sandbox": section})
    assert sandbox_config(config).docker.base_images == {"python:3.12": "mirror/python:1"}
    with pytest.raises(ValidationError, match="base_image"):
        RunConfig.model_validate({"sandbox": {"docker": {"base_image": {}}}})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_rounds_on_a_certified_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """`parl rl run` end to end with real boxes; then a changed task stops the resume, and the
    trained weights play the task through `parl task run --agent engine`."""
    from infra.config import dump_toml

    best_level()
    folder = write_task(tmp_path / "task", "acme/task", "python")
    config = tmp_path / "run.toml"
    config.write_text(dump_toml(config_of(folder, tmp_path)))
    assert cli.run(["rl", "run", "--config", str(config)]) == 2
    assert "has no certificate" in capsys.readouterr().err
    certify(folder)
    assert cli.run(["rl", "run", "--config", str(config)]) == 0, capsys.readouterr().err
    run = tmp_path / "runs" / "folders-001"
    ledger = open_ledger(f"sqlite:///{run}/ledger.db", create=False)
    with ledger.session() as session:
        rounds = session.scalars(select(RoundRow).where(RoundRow.phase == "train")).all()
        assert [row.status for row in rounds] == ["committed", "committed"]
        episodes = session.scalars(select(EpisodeRow)).all()
        assert {row.task_name for row in episodes} == {"acme/task"} and len(episodes) == 8
        assert all(row.correctness is not None for row in episodes if row.outcome == "completed")
        certificate = session.scalars(select(TaskCertificateRow)).one()
        assert certificate.task_id == content_hash(folder)
    ledger.close()
    capsys.readouterr()
    words = ["task", "run", str(folder), "--agent", "engine", "--run", str(run)]
    assert cli.run(words) in (0, 1)  # an untrained policy fails, but it has played
    out, err = capsys.readouterr()
    assert "run folders-001, weights" in out, err
    assert "outcome" in out and "verdict" in out, err
    ledger = open_ledger(f"sqlite:///{run}/ledger.db", create=False)
    Store(ledger, run.name).set_run_status("stopped")  # a finished run has nothing to refuse
    ledger.close()
    shutil.rmtree(folder / "attacks")
    assert cli.run(["rl", "resume", str(run)]) == 2
    assert "is for content" in capsys.readouterr().err
    assert load_task(folder).spec.name == "acme/task"
