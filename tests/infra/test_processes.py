"""Processes are found by the environment they were started with, also when their parent is dead."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable

from infra.processes import environments, marked_with


def start(code: str, **variables: str) -> subprocess.Popen[bytes]:
    """A Python process that has reached its own code."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline()
    return process


def eventually(found: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not found() and time.monotonic() < deadline:
        time.sleep(0.02)
    return found()


def test_a_mark_is_a_whole_value_of_one_variable():
    """No prefix of it, no other variable, no other case; several values at once."""
    first, second = secrets.token_hex(8), secrets.token_hex(8)
    wait = "print(flush=True); input()"
    one, two = start(wait, PARL_TEST_MARK=first), start(wait, PARL_TEST_MARK=second)
    try:
        assert marked_with("PARL_TEST_MARK", [first]) == [one.pid]
        assert marked_with("PARL_TEST_MARK", {first, second}) == sorted([one.pid, two.pid])
        for variable, value in [
            ("PARL_TEST_MARK", first[:-1]),
            ("PARL_TEST", first),
            ("parl_test_mark", first),
            ("TEST_MARK", first),
        ]:
            assert marked_with(variable, [value]) == []
        assert marked_with("PARL_TEST_MARK", []) == []
    finally:
        for process in (one, two):
            process.communicate(b"\n")
    assert marked_with("PARL_TEST_MARK", [first, second]) == []


def test_orphans_and_their_children_are_found():
    """What a dead process started, in a session of its own too."""
    mark = secrets.token_hex(8)
    parent = start(
        "import os, subprocess\n"
        "subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "print(flush=True)\ninput()",
        PARL_TEST_MARK=mark,
    )
    parent.kill()
    parent.wait()
    for pipe in (parent.stdin, parent.stdout):  # the orphan holds them too: not to be read out
        assert pipe is not None
        pipe.close()
    (orphan,) = marked_with("PARL_TEST_MARK", [mark])
    assert orphan != parent.pid
    os.kill(orphan, 9)
    assert eventually(lambda: marked_with("PARL_TEST_MARK", [mark]) == [])


def test_our_own_environment_is_among_them():
    """As it was at our start: a variable set since is not there."""
    os.environ["PARL_TEST_LATE"] = "1"
    try:
        found = dict(environments())
        assert os.getpid() in found and b"PARL_TEST_LATE=1" not in found[os.getpid()]
    finally:
        del os.environ["PARL_TEST_LATE"]
