"""Copies out of a box and into it: what is taken, what is refused, and that no link leads out."""

import asyncio
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.backends import agent_files
from sandbox.backends.base import Level, PooledBox, Reply
from sandbox.extract import CopyLimits, CopyRefused, copy_in, copy_out, parse_listing, walk
from tests.sandbox.conftest import LEVELS, RunInBox

SOURCE = """
import os, socket
from sandbox.toolkit import tool, workdir

@tool
def python(code: str) -> str:
    scope = dict(globals())
    exec(code, scope)
    return str(scope.get("result"))
"""


class FolderBox:
    """A folder of this machine behind the same file methods the agent runs; for what a box's own
    limits would not let a test create."""

    level = Level.NONE
    pid = None
    alive = True
    enforced: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_read = 0

    async def request(self, method: str, params: dict[str, Any], timeout_s: float) -> Reply:
        """What the agent's worker answers."""
        self.num_read += params.get("size", 0)
        answer = agent_files.run(str(self.folder), method, params)
        return Reply(answer["value"], answer.get("error"))

    async def reset(self) -> bool:
        return False

    async def kill(self) -> None:
        return None


async def python(box: PooledBox, code: str) -> str:
    """Run Python inside."""
    params = {"tool": "python", "arguments": {"code": code}, "max_output_bytes": 10_000}
    reply = await box.request("call", {**params, "timeout_s": 10}, 15)
    assert reply.error is None, reply
    return reply.value


def tree(folder: Path) -> dict[str, bytes | None]:
    """Relative path -> content, None for a directory."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }


def out_of(folder: Path, target: Path, limits: CopyLimits | None = None) -> Any:
    return asyncio.run(copy_out(FolderBox(folder), target, limits))


@pytest.mark.parametrize("level", LEVELS)
def test_files_cross_in_and_out(level: Level, in_box: RunInBox, tmp_path: Path):
    """Content, directories, the executable bit and more than one chunk; into an empty box, back."""
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "data.bin").write_bytes(os.urandom((1 << 20) + 17))
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "empty").touch()
    (source / "合同.txt").write_text("内容")

    async def body(box: PooledBox) -> None:
        await box.request("start", {"data": {}, "timeout_s": 5}, 10)
        await copy_in(box, source)
        await python(box, "import os; open('made','w').write('x'); os.mkfifo('pipe')")
        report = await copy_out(box, tmp_path / "out")
        assert report.skipped == [("pipe", "other")]
        assert tree(tmp_path / "out") == tree(source) | {"made": b"x"}
        assert (tmp_path / "out" / "run.sh").stat().st_mode & 0o111
        some = await copy_out(box, tmp_path / "some", only=["deep/er", "run.sh"])
        assert some.files == ["deep/er/data.bin", "run.sh"]

    in_box(level, SOURCE, body)


@pytest.mark.parametrize("level", LEVELS)
def test_copy_in_is_not_redirected_by_a_planted_link(
    level: Level, in_box: RunInBox, tmp_path: Path
):
    """CVE-2018-15664's shape: tests -> elsewhere. Refused as a directory, replaced as a file."""
    source = tmp_path / "source"
    (source / "tests").mkdir(parents=True)
    (source / "tests" / "test.sh").write_text("ours")
    (source / "flat.sh").write_text("ours")

    async def body(box: PooledBox) -> None:
        await box.request("start", {"data": {}, "timeout_s": 5}, 10)
        plant = """
import os
os.mkdir("elsewhere")
open("elsewhere/flat.sh", "w").write("theirs")
os.symlink("elsewhere", "tests")
os.symlink("elsewhere/flat.sh", "flat.sh")
"""
        await python(box, plant)
        with pytest.raises(CopyRefused, match="tests"):
            await copy_in(box, source)
        assert await python(box, "result = sorted(os.listdir('elsewhere'))") == "['flat.sh']"
        assert await python(box, "result = open('elsewhere/flat.sh').read()") == "theirs"
        assert await python(box, "result = os.path.islink('flat.sh')") == "False"

    in_box(level, SOURCE, body)


@pytest.mark.parametrize("level", LEVELS)
def test_a_rewriter_does_not_reach_what_is_copied(level: Level, in_box: RunInBox, tmp_path: Path):
    """A daemon that swaps a file for a link all the time is dead before the listing."""

    async def body(box: PooledBox) -> None:
        await box.request("start", {"data": {}, "timeout_s": 5}, 10)
        swap = """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        for make in (lambda: open("f", "w").write("x"), lambda: os.symlink("/etc/passwd", "f")):
            make()
            os.unlink("f")
time.sleep(0.2)
"""
        await python(box, swap)
        report = await copy_out(box, tmp_path / "out")
        assert set(report.files) <= {"f"} and set(report.skipped) <= {("f", "link")}
        assert all(content in (b"x", b"") for content in tree(tmp_path / "out").values())

    in_box(level, SOURCE, body)


def test_a_hard_link_to_a_symbolic_link_is_skipped(tmp_path: Path):
    """The way through tarfile's "data" filter (cpython#151987): here it is one more link."""
    folder = tmp_path / "box"
    folder.mkdir()
    (folder / "link").symlink_to("/etc/passwd")
    os.link(folder / "link", folder / "hard", follow_symlinks=False)
    (folder / "real").write_text("mine")
    os.link(folder / "real", folder / "twin")
    report = out_of(folder, tmp_path / "out")
    assert report.skipped == [("hard", "link"), ("link", "link")]
    assert tree(tmp_path / "out") == {"real": b"mine", "twin": b"mine"}


def test_a_linked_directory_is_not_entered(tmp_path: Path):
    """Neither absolute nor relative, nor one that was swapped in after the listing."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("hidden")
    folder = tmp_path / "box"
    folder.mkdir()
    (folder / "out").symlink_to(secret)
    (folder / "up").symlink_to("..")
    report = out_of(folder, tmp_path / "one")
    assert sorted(report.skipped) == [("out", "link"), ("up", "link")] and not report.files

    class Swapping(FolderBox):
        async def request(self, method: str, params: dict[str, Any], timeout_s: float) -> Reply:
            reply = await super().request(method, params, timeout_s)
            if method == "list_files":
                (folder / "dir" / "key").unlink()
                (folder / "dir").rmdir()
                (folder / "dir").symlink_to(secret)
            return reply

    (folder / "dir").mkdir()
    (folder / "dir" / "key").write_text("public")
    with pytest.raises(CopyRefused, match=r"NotADirectoryError|Too many levels"):
        asyncio.run(copy_out(Swapping(folder), tmp_path / "two"))
    assert "hidden" not in str(tree(tmp_path / "two"))


def test_a_sparse_file_of_20_gib_is_refused_unread(tmp_path: Path):
    """Its apparent size counts; one within the limits keeps its holes and sends only its data."""
    folder = tmp_path / "box"
    folder.mkdir()
    with (folder / "huge").open("wb") as file:
        file.truncate(20 << 30)
    box = FolderBox(folder)
    with pytest.raises(CopyRefused, match=r"21474836480 bytes \(0 of data\)"):
        asyncio.run(copy_out(box, tmp_path / "out"))
    assert box.num_read == 0 and not (tmp_path / "out").exists()
    with (folder / "huge").open("r+b") as file:
        file.truncate(12 << 20)
        file.seek(8 << 20)
        file.write(b"middle")
    report = out_of(folder, tmp_path / "out")
    assert report.num_bytes == 12 << 20 and report.num_data_bytes < 1 << 20
    copied = tmp_path / "out" / "huge"
    assert copied.read_bytes() == (folder / "huge").read_bytes()
    assert copied.stat().st_blocks * 512 < 1 << 20


def test_devices_pipes_and_sockets_are_skipped_without_waiting(tmp_path: Path):
    """A FIFO without a writer would block whoever opens it; a device file could be a disk."""
    folder = tmp_path / "box"
    folder.mkdir()
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        expected = [("fifo", "other"), ("socket", "other")]
        if os.geteuid() == 0:
            os.mknod(folder / "device", stat.S_IFCHR | 0o600, os.makedev(1, 5))
            expected.insert(0, ("device", "other"))
        assert out_of(folder, tmp_path / "out").skipped == expected
    reply = agent_files.run(str(folder), "read_file", {"path": "fifo", "offset": 0, "size": 1})
    assert reply["error"] == "tool_error" and "not a regular file" in reply["value"]


def test_a_bomb_of_directories_files_or_names_is_refused(tmp_path: Path):
    """Depth, count, total size; an archive inside is one opaque file."""
    folder = tmp_path / "box"
    deep = folder.joinpath(*["d"] * 20)
    deep.mkdir(parents=True)
    with pytest.raises(CopyRefused, match="max_depth=16"):
        out_of(folder, tmp_path / "one")
    wide = tmp_path / "wide"
    wide.mkdir()
    for number in range(30):
        (wide / f"{number}.zip").write_bytes(b"PK" + bytes(1000))
    with pytest.raises(CopyRefused, match="more than 20 entries"):
        out_of(wide, tmp_path / "two", CopyLimits(max_entries=20))
    with pytest.raises(CopyRefused, match="more than 20000 bytes"):
        out_of(wide, tmp_path / "three", CopyLimits(max_total_bytes=20_000))
    report = out_of(wide, tmp_path / "four")
    assert len(report.files) == 30 and all("/" not in path for path in report.files)


def test_the_target_must_be_new(tmp_path: Path):
    """A folder that is already there could hold links."""
    (tmp_path / "box").mkdir()
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError):
        out_of(tmp_path / "box", tmp_path / "out")


LIES = [
    ["/etc/passwd", "file", 1, 0o600, [[0, 1]]],
    ["../up", "file", 1, 0o600, [[0, 1]]],
    ["a/../b", "file", 1, 0o600, []],
    ["a//b", "file", 1, 0o600, []],
    ["nul\0", "file", 1, 0o600, []],
    ["orphan/child", "file", 1, 0o600, []],
    ["x" * 300, "file", 1, 0o600, []],
    ["f", "device", 1, 0o600, []],
    ["f", "file", -1, 0o600, []],
    ["f", "file", 10, 0o600, [[0, 1 << 40]]],
    ["f", "file", 10, 0o600, [[5, 3]]],
    ["f", "file", True, 0o600, []],
    ["f", "file", 1e309, 0o600, []],
    ["f"],
    "f",
    None,
    [["f"], "file", 1, 0, []],
]


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_lying_listing_is_refused(lie: Any):
    """The box is not trusted to list honestly."""
    with pytest.raises(CopyRefused):
        parse_listing([lie], CopyLimits())
    with pytest.raises(CopyRefused, match="twice"):
        parse_listing([["f", "link", 1, 0, []], ["f", "file", 1, 0, []]], CopyLimits())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(json_values)
def test_any_listing_is_parsed_or_refused(value: Any):
    """No other error, and what is accepted stays below its folder."""
    for listing in (value, [value]):
        try:
            entries = parse_listing(listing, CopyLimits())
        except CopyRefused:
            continue
        assert all(".." not in e.path.split("/") and not e.path.startswith("/") for e in entries)


def test_walk_of_a_host_folder_uses_the_same_rules(tmp_path: Path):
    """copy_in's side."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_text("x")
    (tmp_path / "link").symlink_to("/etc")
    assert [(e.path, e.kind) for e in walk(tmp_path, CopyLimits())] == [
        ("a", "directory"),
        ("a/f", "file"),
        ("link", "link"),
    ]
