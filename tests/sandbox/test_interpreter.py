"""The Python of a box, and what of the host it shows."""

import os
from pathlib import Path

import pytest

from sandbox.backends import interpreter
from sandbox.errors import BackendUnavailable


def test_the_system_python_needs_only_usr():
    """Nothing of /usr/local, /home or /root is bound, and installed packages are covered."""
    if not interpreter.SYSTEM_PYTHON.exists():
        pytest.skip("no /usr/bin/python3 here")
    found = interpreter.find_interpreter()
    assert found.path.parent == Path("/usr/bin") and found.library_path is None
    assert all(str(path).startswith(("/usr/bin", "/usr/lib", "/lib")) for path in found.binds)


def test_a_python_elsewhere_brings_its_prefix_without_its_packages(tmp_path: Path):
    """site-packages may hold PARL: the answers of shipped tasks."""
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").touch()
    found = interpreter._layout(tmp_path / "bin" / "python3")
    assert {tmp_path / "bin", tmp_path / "lib"} <= set(found.binds)
    assert packages in found.hidden and found.library_path == tmp_path / "lib"


def test_no_usable_python_names_each_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Missing, or closed to the uid of the box; and what to install."""
    closed = tmp_path / "closed"
    (closed / "bin").mkdir(parents=True)
    (closed / "bin" / "python3").touch()
    closed.chmod(0o700)
    monkeypatch.setattr(interpreter, "SYSTEM_PYTHON", tmp_path / "none")
    monkeypatch.setattr("sys.base_prefix", str(closed))
    with pytest.raises(BackendUnavailable, match=r"none: does not exist.*install the system's"):
        if os.geteuid() != 0:
            closed.chmod(0)
        interpreter.find_interpreter()
    closed.chmod(0o700)
