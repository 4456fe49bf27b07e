"""Which backend a ``parl task`` command takes, and that it says what a task loses there."""

from __future__ import annotations

from pathlib import Path

import pytest

from parl.cli import main as cli
from parl.cli.boxes import boxes
from tests.sandbox.conftest import best_level

TOTALS = Path(__file__).parents[2] / "data" / "formats" / "harbor" / "totals"


def test_another_backend_than_the_task_s_image_is_one_line(capsys: pytest.CaptureFixture[str]):
    """With every downgrade in it."""
    best_level()
    assert cli.run(["task", "run", str(TOTALS), "--agent", "oracle"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("backend ") and "not the task's image" in lines[0]
    assert "downgrades: environment.env.CURRENCY" in lines[0]
    assert "image python:3.12-slim is not used" in lines[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "dokcer"], "--backend 'dokcer': Input should be"),
        (
            ["--backend", "docker", "--base-image", "python"],
            "--base-image 'python': expected NAME=LOCAL",
        ),
        (["--base-image", "a=b"], "--base-image 'a=b' with --backend auto: only docker builds"),
        (["--sandbox", "none.toml"], "--sandbox none.toml"),
    ],
)
def test_wrong_settings_are_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.run(["task", "run", str(TOTALS), *words]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


def test_the_command_line_wins_over_the_file(tmp_path: Path):
    file = tmp_path / "boxes.toml"
    file.write_text(
        'level = "A"\nmemory_mib = 300\n[docker]\nwritable = ["/etc"]\n'
        '[docker.base_images]\na = "1"\nb = "2"\n'
    )
    assert boxes("auto", file=file).level == "A"
    config = boxes("docker", ["b=3"], file)
    assert config.level == "docker" and config.memory_mib == 300 and config.max_processes == 256
    assert config.docker.base_images == {"a": "1", "b": "3"} and config.docker.writable == ("/etc",)
