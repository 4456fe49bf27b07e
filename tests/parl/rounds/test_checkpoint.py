"""Checkpoints are there whole or not at all, and only those that a row names stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from parl.errors import CheckpointError, RunError
from parl.rounds.checkpoint import (
    TEMP_PREFIX,
    hash_folder,
    prune,
    sweep,
    verify_checkpoint,
    write_checkpoint,
)


class Notes:
    """Saves a file and one in a subfolder; may fail half way."""

    def __init__(self, text: str, fails: bool = False) -> None:
        self._text = text
        self._fails = fails

    def save(self, folder: Path) -> None:
        assert list(folder.iterdir()) == []
        (folder / "a.txt").write_text(self._text)
        if self._fails:
            raise OSError("disk full")
        (folder / "rank-0").mkdir()
        (folder / "rank-0" / "b.bin").write_bytes(b"\0" * 10)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_verifies_under_the_hash_it_was_written_with(tmp_path: Path):
    """The root is made as needed and no temporary folder stays."""
    root = tmp_path / "run" / "checkpoints"
    path, digest = write_checkpoint(Notes("x"), root, "train-00001")
    assert path == root / "train-00001" and names(root) == ["train-00001"]
    assert (path / "rank-0" / "b.bin").is_file()
    verify_checkpoint(path, digest)


def test_equal_contents_have_equal_hashes_wherever_they_lie(tmp_path: Path):
    """The hash is over relative names and contents."""
    digests = {write_checkpoint(Notes("x"), tmp_path / n, n)[1] for n in ("a", "b")}
    assert len(digests) == 1
    assert digests != {write_checkpoint(Notes("y"), tmp_path / "c", "c")[1]}


def test_a_save_that_fails_leaves_no_checkpoint(tmp_path: Path):
    """What is half written has another name, and the next try replaces it."""
    with pytest.raises(RunError, match=r"disk full.*the last committed round is intact"):
        write_checkpoint(Notes("x", fails=True), tmp_path, "train-00001")
    assert names(tmp_path) == [f"{TEMP_PREFIX}train-00001"]
    path, digest = write_checkpoint(Notes("x"), tmp_path, "train-00001")
    assert names(tmp_path) == ["train-00001"]
    verify_checkpoint(path, digest)


def test_a_checkpoint_without_a_row_is_replaced(tmp_path: Path):
    """The crash came between rename and commit: the round writes the same name again."""
    write_checkpoint(Notes("old"), tmp_path, "train-00001")
    path, digest = write_checkpoint(Notes("new"), tmp_path, "train-00001")
    assert (path / "a.txt").read_text() == "new"
    verify_checkpoint(path, digest)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "a.txt").write_text("X"),
        lambda path: (path / "a.txt").rename(path / "c.txt"),
        lambda path: (path / "extra").write_text(""),
        lambda path: (path / "rank-0" / "b.bin").unlink(),
        lambda path: (path / "rank-0" / "b.bin").rename(path / "b.bin"),
    ],
    ids=["changed", "renamed", "added", "removed", "moved"],
)
def test_any_change_after_the_commit_is_found(tmp_path: Path, damage):
    """CheckpointError, which ends the command with exit code 2."""
    path, digest = write_checkpoint(Notes("x"), tmp_path, "train-00001")
    damage(path)
    with pytest.raises(CheckpointError, match=f"expects {digest[:12]}") as error:
        verify_checkpoint(path, digest)
    assert error.value.exit_code == 2 and "\n" not in str(error.value)


def test_a_missing_checkpoint_is_named(tmp_path: Path):
    """The message says which folder to bring back."""
    with pytest.raises(CheckpointError, match="gone is missing"):
        verify_checkpoint(tmp_path / "gone", "0" * 64)


def test_sweep_deletes_only_folders_without_a_row(tmp_path: Path):
    """Half-written folders go too; files and named folders stay."""
    for name in ("sft-00000", "train-00001", "train-00003"):
        write_checkpoint(Notes(name), tmp_path, name)
    (tmp_path / f"{TEMP_PREFIX}train-00005").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    kept = [tmp_path / "sft-00000", Path("elsewhere/checkpoints/train-00001")]
    before = hash_folder(tmp_path / "train-00001")
    removed = sweep(tmp_path, kept)
    assert [path.name for path in removed] == [f"{TEMP_PREFIX}train-00005", "train-00003"]
    assert names(tmp_path) == ["notes.txt", "sft-00000", "train-00001"]
    assert hash_folder(tmp_path / "train-00001") == before
    assert sweep(tmp_path, kept) == []


def test_sweep_of_a_run_without_checkpoints_is_fine(tmp_path: Path):
    """A new run has no folder yet."""
    assert sweep(tmp_path / "checkpoints", []) == []


def test_only_the_newest_checkpoints_stay(tmp_path: Path):
    """Order of commit counts, not names; strangers and what is gone already are left alone."""
    committed = [tmp_path / name for name in ("sft-00000", "train-00004", "train-00009")]
    for path in (*committed, tmp_path / "mine"):
        write_checkpoint(Notes(path.name), tmp_path, path.name)
    assert prune(tmp_path, committed, keep=3) == []
    assert prune(tmp_path, committed, keep=1) == [tmp_path / "sft-00000", tmp_path / "train-00004"]
    assert names(tmp_path) == ["mine", "train-00009"]
    assert prune(tmp_path, committed, keep=1) == []
