"""Shell parts of the ground: what they refuse and what they say."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_readme_shows_the_demo_early():
    """A reader finds the one command before line 35."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert "make demo" in lines[:34]


def test_licence_is_apache_2():
    """The full text, as pyproject.toml declares it."""
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_help_names_every_public_target():
    """`make` alone lists the commands."""
    result = run("make", "help")
    assert result.returncode == 0, result.stderr
    listed = {line.split()[0] for line in result.stdout.splitlines() if line[:1].islower()}
    assert {"demo", "test", "ci-slow", "lint", "evidence-loop", "clean", "help"} <= listed


def test_scripts_are_executable_and_parse():
    """Shell files can be run and have no syntax error."""
    for path in [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]:
        assert os.access(path, os.X_OK), path
        assert run("bash", "-n", str(path)).returncode == 0, path


def test_present_command_installs_nothing():
    """A command on PATH is enough; nothing is printed and apt is not asked."""
    result = run("scripts/system-package.sh", "sh", "no-such-package")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_missing_command_without_root_is_one_line(tmp_path):
    """Who is not root is told what to install."""
    for name in ("bash", "env"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    fake_id = tmp_path / "id"
    fake_id.write_text("#!/bin/sh\necho 1000\n")
    fake_id.chmod(0o755)
    result = run("scripts/system-package.sh", "no-such-command", "bubblewrap", PATH=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "apt-get install bubblewrap" in result.stderr


def test_find_python_prefers_311_and_honours_python(tmp_path):
    """PYTHON wins when it is new enough; one that is too old is passed over."""
    found = run("scripts/find-python.sh")
    assert found.returncode == 0, found.stderr
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    assert run("scripts/find-python.sh", PYTHON=str(old)).stdout == found.stdout
    new = tmp_path / "new-python"
    new.write_text(f'#!/bin/sh\nexec {found.stdout.strip()} "$@"\n')
    new.chmod(0o755)
    assert run("scripts/find-python.sh", PYTHON=str(new)).stdout.strip() == str(new)


@pytest.mark.parametrize(("size", "code"), [(512 * 1024, 0), (512 * 1024 + 1, 1)])
def test_large_files(tmp_path, size, code):
    """The hook refuses what does not belong in git and names it."""
    path = tmp_path / "weights with space.bin"
    path.write_bytes(b"\0" * size)
    result = run("scripts/large-files.sh", str(path))
    assert result.returncode == code
    assert (str(path) in result.stderr) == bool(code)


def test_no_machine_paths_or_registries_are_committed():
    """Committed files name neither this machine's folders nor package hosts."""
    listed = run("git", "ls-files", "-z")
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    # the names are put together here so that this file does not hold them either
    hosts = ("files.python" + "hosted", "registry." + "npmjs", "deb." + "debian.org")
    pattern = re.compile("|".join(map(re.escape, ("/" + "work/", "/" + "root/", *hosts))))
    here = Path(__file__).name
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.name == here or not path.is_file():
            continue
        found = pattern.search(path.read_text(encoding="utf-8", errors="replace"))
        assert found is None, f"{name}: {found.group() if found else ''}"
