"""cgroup discovery and limits on written-out trees; level A itself is tested on the real one."""

from pathlib import Path

import pytest

from sandbox.backends import cgroup
from sandbox.backends.cgroup import CgroupLimits
from sandbox.errors import BackendUnavailable

LIMITS = CgroupLimits(memory_bytes=1 << 27, max_processes=20, cpus=0.5)


def tree_v2(root: Path, subtree: str, controllers: str = "cpu memory pids") -> Path:
    """A slice with one scope in it, as systemd delegates it; returns the proc folder to read."""
    scope = root / "cg" / "app.slice" / "me.scope"
    scope.mkdir(parents=True)
    for directory in (scope, scope.parent, scope.parent.parent):
        (directory / "cgroup.procs").write_text("1\n")
        (directory / "cgroup.controllers").write_text(controllers)
        (directory / "cgroup.subtree_control").write_text("")
    (scope.parent / "cgroup.subtree_control").write_text(subtree)
    proc = root / "proc"
    proc.mkdir()
    (proc / "mountinfo").write_text(
        f"30 20 0:26 / {root}/cg rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
    )
    (proc / "cgroup").write_text("0::/app.slice/me.scope\n")
    return proc


def test_v2_uses_the_nearest_ancestor_that_delegates(tmp_path: Path):
    """A box becomes a sibling of our own scope, inside the limits of the slice."""
    proc = tree_v2(tmp_path, "cpu memory pids")
    (tmp_path / "cg/app.slice/me.scope/cgroup.controllers").write_text("")
    parents = cgroup.find_parents(proc)
    assert parents.of("x") == (tmp_path / "cg/app.slice/parl-x",)


def test_v2_asks_for_controllers_and_writes_every_limit(tmp_path: Path):
    """Files, values, and no directory left when one limit cannot be set."""
    proc = tree_v2(tmp_path, "")
    parents = cgroup.find_parents(proc)
    assert parents.version == 2
    (parent,) = parents.directories
    assert (parent / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    with pytest.raises(BackendUnavailable, match=r"memory\.max"):
        cgroup.create(parents.of("box"), 2, LIMITS)
    assert not (parent / "parl-box").exists()


def test_v2_without_the_controllers_is_refused(tmp_path: Path):
    """A cgroup that only counts CPU cannot hold a box."""
    proc = tree_v2(tmp_path, "", controllers="cpu")
    with pytest.raises(BackendUnavailable, match="not given the memory and pids controllers"):
        cgroup.find_parents(proc)


def test_v1_follows_bind_mounted_roots(tmp_path: Path):
    """In a container the mount's root is our own cgroup; the path is relative to it."""
    lines = []
    for number, name in enumerate(cgroup.CONTROLLERS):
        (tmp_path / name / "inner").mkdir(parents=True)
        lines.append(
            f"{30 + number} 20 0:26 /docker/abc {tmp_path}/{name} rw - cgroup cgroup rw,{name}"
        )
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "mountinfo").write_text("\n".join(lines))
    (proc / "cgroup").write_text(
        "3:memory:/docker/abc/inner\n2:pids:/docker/abc\n1:cpu:/docker/abc/inner\n"
    )
    parents = cgroup.find_parents(proc)
    assert parents.version == 1
    assert [str(path) for path in parents.of("x")] == [
        f"{tmp_path}/memory/inner/parl-x",
        f"{tmp_path}/pids/parl-x",
        f"{tmp_path}/cpu/inner/parl-x",
    ]


def test_no_cgroups_is_a_reason(tmp_path: Path):
    """Nothing mounted: level A says so."""
    (tmp_path / "mountinfo").write_text("1 1 0:1 / / rw - ext4 /dev/vda rw\n")
    (tmp_path / "cgroup").write_text("")
    with pytest.raises(BackendUnavailable, match="no cgroup file system"):
        cgroup.find_parents(tmp_path)


def limits_v2(root: Path, **values: str) -> tuple[Path, ...]:
    """A v2 cgroup with these limit files."""
    files = {"memory.max": "134217728", "memory.swap.max": "0", "pids.max": "20",
             "cpu.max": "50000 100000"} | values  # fmt: skip
    for name, value in files.items():
        (root / name).write_text(value + "\n")
    return (root,)


def test_limits_are_read_back_v2(tmp_path: Path):
    """The values that were written; an unlimited one is an error."""
    assert cgroup.read_limits(limits_v2(tmp_path), 2) == LIMITS
    with pytest.raises(BackendUnavailable, match="processes=max"):
        cgroup.read_limits(limits_v2(tmp_path, **{"pids.max": "max"}), 2)


def test_limits_are_read_back_v1(tmp_path: Path):
    """From one directory per controller; no quota is -1."""
    directories = tuple(tmp_path / name for name in cgroup.CONTROLLERS)
    values = {
        "memory": {"memory.limit_in_bytes": 1 << 27, "memory.memsw.limit_in_bytes": 1 << 27},
        "pids": {"pids.max": 20},
        "cpu": {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": 50_000},
    }
    for directory in directories:
        directory.mkdir()
        for name, value in values[directory.name].items():
            (directory / name).write_text(f"{value}\n")
    assert cgroup.read_limits(directories, 1) == LIMITS
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    with pytest.raises(BackendUnavailable, match="cpu=-1"):
        cgroup.read_limits(directories, 1)
    (tmp_path / "pids" / "pids.max").unlink()
    with pytest.raises(BackendUnavailable, match=r"has no pids\.max"):
        cgroup.read_limits(directories, 1)


def test_swap_that_is_not_accounted_is_a_hole_only_where_there_is_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A memory limit with free swap behind it limits nothing: that is an error, not a warning."""
    for swap, words in ((False, None), (True, "no such limit file")):
        monkeypatch.setattr(cgroup, "_has_swap", lambda swap=swap: swap)
        root = tmp_path / f"swap-{swap}"
        root.mkdir()
        limits_v2(root)
        (root / "memory.swap.max").unlink()
        if words is None:
            cgroup._write_limit((root,), "memory.swap.max", 0)
            assert cgroup.read_limits((root,), 2) == LIMITS
        else:
            with pytest.raises(FileNotFoundError, match=words):
                cgroup._write_limit((root,), "memory.swap.max", 0)
            with pytest.raises(BackendUnavailable, match=r"memory\.swap\.max"):
                cgroup.read_limits((root,), 2)


def test_both_spellings_of_the_kill_count_are_read(tmp_path: Path):
    """v1 memory.oom_control, v2 memory.events; no cgroup, no kills."""
    assert cgroup.oom_kills(()) == 0
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert cgroup.oom_kills((tmp_path,)) == 3
    (tmp_path / "memory.events").write_text("low 0\noom 2\noom_kill 5\noom_group_kill 0\n")
    assert cgroup.oom_kills((tmp_path,)) == 5
