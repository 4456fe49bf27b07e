"""A model repository as Triton reads it, without the server."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.adapters.triton_export import export_repository, read_engine
from engine.config import EngineConfig
from engine.errors import CheckpointError
from parl.cli.model import app
from tests.engine.adapters.tiny_hub import LLAMA, save_tiny


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(LLAMA, tmp_path_factory.mktemp("hub"))


@pytest.mark.parametrize("link", [False, True])
def test_a_repository(hub: Path, tmp_path: Path, link: bool):
    """config.pbtxt, a version with the model's code, its engine and its folder."""
    folder = export_repository(hub, tmp_path, EngineConfig(max_context=99), link=link)
    assert folder == tmp_path / "parl_mri"
    assert "decoupled: True" in (folder / "config.pbtxt").read_text()
    compile((folder / "1" / "model.py").read_text(), "model.py", "exec")
    assert read_engine(folder / "1").max_context == 99
    assert (folder / "1" / "model").is_symlink() == link
    assert (folder / "1" / "model" / "config.json").is_file()
    with pytest.raises(CheckpointError, match="exists already"):
        export_repository(hub, tmp_path)


def test_what_cannot_be_exported(hub: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="expected a hub folder"):
        export_repository(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(CheckpointError, match="exceeds the model's 256 positions"):
        export_repository(hub, tmp_path / "out", EngineConfig(max_context=300))


def test_the_command(hub: Path, tmp_path: Path):
    """Says where it wrote, and how to serve it."""
    result = CliRunner().invoke(
        app, ["export-triton", str(hub), str(tmp_path / "out"), "--max-context", "128", "--link"]
    )
    assert result.exit_code == 0, result.output
    assert "parl_mri" in result.output and "tritonserver" in result.output
    assert read_engine(tmp_path / "out" / "parl_mri" / "1").max_context == 128
