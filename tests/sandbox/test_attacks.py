"""Attacks from inside a box (facts/sandboxes.md 5.2): contained, and the box stays usable."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from sandbox.backends import seccomp
from sandbox.backends.base import Level, PooledBox
from sandbox.backends.processes import marked_processes
from tests.sandbox.conftest import BOXED, CONFIG, COUNTED, RunInBox

SOURCE = '''
import ctypes, errno, json, mmap, os, resource, signal, socket, subprocess, sys, time
from sandbox.toolkit import tool, workdir

libc = ctypes.CDLL(None, use_errno=True)

@tool
def python(code: str) -> str:
    scope = dict(globals())
    exec(code, scope)
    return json.dumps(scope.get("result"))

def attempt(action):
    """Name of the errno an action fails with, or its value."""
    try:
        return repr(action())
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error.errno))
    except Exception as error:
        return type(error).__name__
'''


async def attack(box: PooledBox, code: str, timeout_s: float = 10.0) -> object:
    """Run Python in the box; the value of ``result``, or the error class of the reply."""
    params = {"tool": "python", "arguments": {"code": code}, "max_output_bytes": 100_000}
    reply = await box.request("call", {**params, "timeout_s": timeout_s}, timeout_s + 10)
    return json.loads(reply.value) if reply.error is None else reply.error


async def usable(box: PooledBox) -> None:
    """The box resets to pristine and serves the next episode."""
    assert await box.reset(), "something survived the reset"
    reply = await box.request("start", {"data": {}, "timeout_s": 5}, 10)
    assert reply.error is None
    assert await attack(box, "result = 1 + 1") == 2


def contained(in_box: RunInBox, level: Level, code: str, timeout_s: float = 10.0) -> object:
    """Run an attack in a box of its own and check that the box is usable afterwards."""

    async def body(box: PooledBox) -> object:
        await box.request("start", {"data": {}, "timeout_s": 5}, 10)
        result = await attack(box, code, timeout_s)
        await usable(box)
        return result

    return in_box(level, SOURCE, body)


@pytest.mark.parametrize("level", BOXED)
def test_fork_bomb_stops_at_the_process_limit(level: Level, in_box: RunInBox):
    """fork fails with EAGAIN below the limit, and every child is gone after the reset."""
    code = """
children = 0
try:
    while children < 1000:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        children += 1
except BlockingIOError:
    pass
result = children
"""
    children = contained(in_box, level, code)
    assert isinstance(children, int) and 5 < children <= CONFIG.max_processes


@pytest.mark.parametrize("level", BOXED)
def test_memory_hog_is_refused_or_killed(level: Level, in_box: RunInBox):
    """A, docker: the worker dies, the agent lives. Level B: MemoryError in the process."""
    code = """
hog = []
while len(hog) < 4000:
    hog.append(b"x" * (1 << 20))
result = len(hog)
"""
    expected = "crash" if level is Level.B else "died"
    assert contained(in_box, level, code) == expected


@pytest.mark.parametrize("level", COUNTED)
def test_many_small_hogs_share_one_limit(level: Level, in_box: RunInBox):
    """A cgroup limits the box, not each process: eight times 30 MiB do not fit into 128."""

    async def body(box: PooledBox) -> None:
        await box.request("start", {"data": {}, "timeout_s": 5}, 10)
        code = """
for _ in range(8):
    if os.fork() == 0:
        block = b"x" * (30 << 20)
        time.sleep(60)
        os._exit(0)
time.sleep(1.5)
result = "all alive"
"""
        await attack(box, code)
        assert box.oom_kills > 0
        await usable(box)

    in_box(level, SOURCE, body)


@pytest.mark.parametrize("level", COUNTED)
def test_a_death_by_memory_is_told_from_other_deaths(level: Level, in_box: RunInBox):
    """From the cgroup's oom_kill count: an exit is an exit, an out-of-memory kill is named."""

    async def body(box: PooledBox) -> None:
        await box.request("start", {"data": {}, "timeout_s": 5}, 10)
        for code, value in (
            ("os._exit(9)", "call"),
            ("x = b'x' * (300 << 20)", "out of memory"),
            ("os.kill(os.getpid(), 9)", "call"),
        ):
            params = {"tool": "python", "arguments": {"code": code}, "max_output_bytes": 99}
            reply = await box.request("call", {**params, "timeout_s": 10}, 20)
            assert (reply.error, reply.value) == ("died", value)
        assert box.oom_kills == 1

    in_box(level, SOURCE, body)


@pytest.mark.parametrize("level", BOXED)
def test_filling_the_disk_stops_at_its_size(level: Level, in_box: RunInBox):
    """The working directory is a capped tmpfs; /tmp is the same one."""
    code = """
written = 0
def fill():
    global written
    for name in range(100):
        with open(workdir() / f"f{name}", "wb") as file:
            for _ in range(4):
                file.write(b"x" * (1 << 20))
                file.flush()
                written += 1
fills = attempt(fill)
result = [written, fills, os.path.realpath("/tmp") == str(workdir())]
"""
    written, error, same = contained(in_box, level, code)  # type: ignore[misc]
    assert (written, error, same) == (CONFIG.disk_mib, "ENOSPC", True)


@pytest.mark.parametrize("level", BOXED)
def test_everything_else_is_read_only(level: Level, in_box: RunInBox):
    """Root, system directories, /dev and /dev/shm, /proc settings of the kernel."""
    code = """
paths = ["/x", "/usr/x", "/usr/bin/x", "/usr/lib/x", "/dev/x", "/dev/shm/x", "/etc/x", "/proc/x",
         "/usr/lib/python3/x"]
result = {path: attempt(lambda: open(path, "w")) for path in paths}
result["sysctl"] = attempt(lambda: open("/proc/sys/kernel/hostname", "w").write("x"))
result["mkdir"] = attempt(lambda: os.mkdir("/new"))
"""
    result = contained(in_box, level, code)
    assert isinstance(result, dict)
    assert set(result.values()) <= {"EROFS", "ENOENT", "EACCES"}, result


@pytest.mark.parametrize("level", BOXED)
def test_no_network(level: Level, in_box: RunInBox):
    """No route, no names, no host sockets; only an own loopback."""
    code = """
def connect(host, port):
    with socket.socket() as sock:
        sock.settimeout(2)
        sock.connect((host, port))
result = {
    "outside": attempt(lambda: connect("192.0.2.1", 80)),
    "metadata": attempt(lambda: connect("169.254.169.254", 80)),
    "name": attempt(lambda: socket.getaddrinfo("example.org", 80)),
    "interfaces": [name for _, name in socket.if_nameindex()],
    "raw": attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)),
}
"""
    result = contained(in_box, level, code)
    assert isinstance(result, dict)
    assert result["outside"] == result["metadata"] == "ENETUNREACH"
    assert result["interfaces"] == ["lo"] and result["raw"] == "EPERM"
    assert result["name"] in ("gaierror", "EAI_AGAIN", "-3", "-2"), result


@pytest.mark.parametrize("level", BOXED)
def test_killing_everything_kills_only_itself(level: Level, in_box: RunInBox):
    """kill -9 -1 reaches neither the agent nor the host."""
    code = """
if os.fork() == 0:
    os.kill(-1, 9)
    os._exit(0)
time.sleep(5)
"""
    assert contained(in_box, level, code) == "died"
    visible = f"result = [attempt(lambda: os.kill(1, 9)), os.path.exists('/proc/{os.getpid()}')]"
    assert contained(in_box, level, visible) == ["None", False]


@pytest.mark.parametrize("level", BOXED)
def test_a_daemon_does_not_outlive_its_episode(level: Level, in_box: RunInBox):
    """Double fork, new session, signals ignored: gone at the reset, and at the box's end."""

    async def body(box: PooledBox) -> None:
        await box.request("start", {"data": {}, "timeout_s": 5}, 10)
        code = """
if os.fork() == 0:
    os.setsid()
    for number in (1, 2, 15):
        signal.signal(number, signal.SIG_IGN)
    if os.fork() == 0:
        while True:
            with open(workdir() / "rewritten", "w") as file:
                file.write("reward")
            time.sleep(0.01)
    os._exit(0)
for _ in range(400):  # a loaded machine takes a while to come to the grandchild
    if os.path.exists(workdir() / "rewritten"):
        break
    time.sleep(0.01)
result = os.path.exists(workdir() / "rewritten")
"""
        assert await attack(box, code) is True
        await usable(box)
        await asyncio.sleep(0.1)
        assert await attack(box, "result = os.listdir(workdir())") == []
        assert await attack(box, code) is True
        await box.kill()
        assert not marked_processes(box.box_id)

    in_box(level, SOURCE, body)


@pytest.mark.parametrize("level", BOXED)
def test_huge_output_is_refused(level: Level, in_box: RunInBox):
    """A forged frame of 4 GiB ends the worker; prints go nowhere."""
    forged = """
for fd in range(3, 20):
    try:
        os.write(fd, b"\\xff\\xff\\xff\\xff" + b"x" * 100)
    except OSError:
        pass
time.sleep(0.2)
"""
    assert contained(in_box, level, forged) == "died"
    noisy = "sys.stdout.write('x' * 10_000_000); sys.stderr.write('y' * 10_000_000); result = 1"
    assert contained(in_box, level, noisy) == 1


@pytest.mark.parametrize("level", BOXED)
def test_the_box_shows_nothing_of_the_host(level: Level, in_box: RunInBox):
    """Command lines, environment, mounts and files name no host path, user or process."""
    code = """
commands = {}
for pid in os.listdir("/proc"):
    if pid.isdigit():
        commands[pid] = open(f"/proc/{pid}/cmdline").read()
result = {
    "commands": commands,
    "environment": dict(os.environ),
    "mounts": open("/proc/self/mountinfo").read(),
    "ids": [os.getuid(), os.getgid(), os.getgroups(), os.uname().nodename],
    "root": sorted(os.listdir("/")),
    "etc": os.listdir("/etc") if os.path.exists("/etc") else [],
    "alternatives": [os.readlink(entry.path) for entry in os.scandir("/etc/alternatives")]
    if os.path.exists("/etc/alternatives") else [],
    "cgroup": open("/proc/self/cgroup").read(),
    "agent": attempt(lambda: open("/proc/1/mem", "rb")),
    "agent environment": attempt(lambda: open("/proc/1/environ").read()),
}
"""
    result = contained(in_box, level, code)
    assert isinstance(result, dict)
    here = str(Path(__file__).parents[2])
    text = json.dumps(result)
    assert here not in text and str(Path.home()) not in text
    assert "--ro-bind" not in text and "bwrap" not in text
    assert set(result["commands"]) <= {"1", *map(str, range(2, 12))}
    names = {"PARL_BOX", "PATH", "HOME", "TMPDIR", "LANG", "PWD", "HOSTNAME"}
    assert set(result["environment"]) <= names
    uid, gid, groups, node = result["ids"]
    assert uid == gid != 0 and set(groups) <= {gid, 65534} and node == "box"
    roots = {"bin", "box", "dev", "etc", "lib", "lib32", "lib64", "proc", "tmp", "usr"}
    roots |= {"sys", ".dockerenv"} if level is Level.DOCKER else set()
    assert set(result["root"]) <= roots
    assert level is Level.DOCKER or set(result["etc"]) <= {"alternatives"}
    assert all(target.startswith(("/usr/", "/lib")) for target in result["alternatives"])
    assert result["agent"] == result["agent environment"] == "EACCES"


@pytest.mark.parametrize("level", BOXED)
def test_no_capabilities_and_the_filter_is_on(level: Level, in_box: RunInBox):
    """Zero capabilities, no new privileges, seccomp mode 2; denied calls fail with EPERM."""
    numbers = {**seccomp.DENIED[os.uname().machine], **seccomp.DENIED_EVERYWHERE}
    code = f"""
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
keys = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp"]
result = {{key: status[key].strip() for key in keys}}
calls = {numbers!r}
result["calls"] = {{}}
for name, number in calls.items():
    value = libc.syscall(number, 0, 0, 0, 0, 0, 0)
    result["calls"][name] = [value, errno.errorcode[ctypes.get_errno()]]
"""
    result = contained(in_box, level, code)
    assert isinstance(result, dict)
    wrong = {name: got for name, got in result.pop("calls").items() if got != [-1, "EPERM"]}
    assert not wrong
    zero = "0" * 16
    assert result == {
        "CapInh": zero, "CapPrm": zero, "CapEff": zero, "CapBnd": zero, "CapAmb": zero,
        "NoNewPrivs": "1", "Seccomp": "2",
    }  # fmt: skip


@pytest.mark.parametrize("level", BOXED)
def test_no_new_namespaces_by_clone(level: Level, in_box: RunInBox):
    """clone with a namespace flag is EPERM, clone3 does not exist, plain processes still start."""
    code = f"""
NEWUSER, SIGCHLD = 0x10000000, 17
def refused(number, *arguments):
    value = libc.syscall(number, *arguments)
    return errno.errorcode[ctypes.get_errno()] if value < 0 else value
result = [
    refused({seccomp.CLONE[os.uname().machine]}, NEWUSER | SIGCHLD, 0, 0, 0, 0),
    refused({seccomp.CLONE3}, 0, 0),
    subprocess.run(["/usr/bin/true"]).returncode,
]
"""
    assert contained(in_box, level, code) == ["EPERM", "ENOSYS", 0]


@pytest.mark.parametrize("level", BOXED)
def test_what_cannot_be_undone_makes_the_box_dirty(level: Level, in_box: RunInBox):
    """Changes to the agent's own process are noticed by the reset."""

    async def body(box: PooledBox) -> None:
        await box.request("start", {"data": {}, "timeout_s": 5}, 10)
        code = "os.sched_setscheduler(1, os.SCHED_BATCH, os.sched_param(0)); result = 1"
        assert await attack(box, code) == 1
        assert not await box.reset()

    in_box(level, SOURCE, body)


@pytest.mark.parametrize("level", BOXED)
def test_deep_and_odd_files_do_not_break_the_reset(level: Level, in_box: RunInBox):
    """Links out of the box, odd names, closed and nested directories."""
    code = """
os.symlink("/usr", workdir() / "link")
os.symlink("nowhere", workdir() / "dangling")
os.mkfifo(workdir() / "pipe")
os.makedirs(workdir() / "a/b/c")
(workdir() / "a/b/c/f").write_text("x")
os.chmod(workdir() / "a/b", 0)
open(os.path.join(os.fsencode(workdir()), b"\\xff\\n"), "w").close()
result = 1
"""
    assert contained(in_box, level, code) == 1


@pytest.mark.parametrize("level", BOXED)
def test_a_tree_too_deep_to_remove_costs_the_box_not_the_next_episode(
    level: Level, in_box: RunInBox
):
    """The reset says no; the pool throws such a box away."""

    async def body(box: PooledBox) -> None:
        await box.request("start", {"data": {}, "timeout_s": 5}, 10)
        code = """
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")
result = 1
"""
        assert await attack(box, code) == 1
        assert not await box.reset()

    in_box(level, SOURCE, body)


@pytest.mark.slow
@pytest.mark.parametrize("level", BOXED)
def test_cpu_time_of_a_process_is_limited(level: Level, in_box: RunInBox):
    """A busy loop dies at RLIMIT_CPU even when its deadline is later."""
    assert contained(in_box, level, "while True: pass", timeout_s=60) == "died"


@pytest.mark.slow
@pytest.mark.parametrize("level", COUNTED)
def test_cpu_share_of_a_box_is_limited(level: Level, in_box: RunInBox):
    """Four busy processes of a box together get about cpus x wall time."""
    code = """
for _ in range(4):
    if os.fork() == 0:
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            pass
        os._exit(0)
for _ in range(4):
    os.wait()
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
result = usage.ru_utime + usage.ru_stime
"""
    seconds = contained(in_box, level, code)
    assert isinstance(seconds, float) and seconds < 4 * CONFIG.cpus * 1.3


def test_a_seccomp_program_exists_for_both_architectures():
    """Whole instructions of 8 bytes; jumps fit; ends with allow."""
    for machine in seccomp.AUDIT_ARCH:
        code = seccomp.program(machine)
        assert len(code) % 8 == 0 and len(code) // 8 < 4096
