"""Leases: the row precedes the thing, and what nobody owns is removed exactly once."""

import subprocess
import sys
import threading
import time

import pytest

from infra.db.engine import Ledger
from infra.db.models import LeaseRow
from infra.leases import LeaseBook, LeaseError, is_dead, process_owner


@pytest.fixture
def book(ledger: Ledger) -> LeaseBook:
    return LeaseBook(ledger)


@pytest.fixture
def dead_owner() -> str:
    """Owner string of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = process_owner(process.pid)
    assert not is_dead(owner)
    process.communicate(b"\n")
    return owner


def test_release_deletes_the_row_and_may_be_repeated(book: LeaseBook) -> None:
    """acquire writes what it was told, release leaves nothing."""
    lease = book.acquire("box", "b1", 60, {"pid": 5})
    (held,) = book.held()
    assert (held.id, held.kind, held.ref, held.data_json) == (lease.id, "box", "b1", {"pid": 5})
    assert held.deadline == pytest.approx(time.time() + 60, abs=10)
    book.release(lease.id)
    book.release(lease.id)
    assert book.held() == []


def test_acquire_again_renews_own_and_refuses_others(book: LeaseBook, ledger: Ledger) -> None:
    """(kind, ref) has one owner."""
    first = book.acquire("box", "b1", 60)
    again = book.acquire("box", "b1", 600)
    assert again.id == first.id and again.deadline > first.deadline
    other = LeaseBook(ledger, owner="elsewhere:1:1")
    with pytest.raises(LeaseError, match=r"lease box 'b1' is held by .* \(not known to be dead\)"):
        other.acquire("box", "b1", 60)


def test_renew_tells_a_lost_lease(book: LeaseBook) -> None:
    """An owner that slept past its deadline learns that the thing is no longer its own."""
    lease = book.acquire("box", "b1", -1)
    book.renew(lease.id, 60)
    assert book.expired() == []
    assert book.renew_all(-1) == 1
    book.reap({"box": lambda row: None})
    with pytest.raises(LeaseError, match="its deadline passed and it was reaped"):
        book.renew(lease.id, 60)


def test_hold_keeps_the_lease_of_a_failed_block(book: LeaseBook) -> None:
    """After an exception nobody knows what exists, so the row stays for the reaper."""
    with book.hold("box", "good", 60):
        assert len(book.held()) == 1
    with pytest.raises(ZeroDivisionError), book.hold("box", "bad", 60):
        _ = 1 / 0
    assert [row.ref for row in book.held()] == ["bad"]


def test_dead_local_owner_is_reaped_at_once(
    book: LeaseBook, ledger: Ledger, dead_owner: str
) -> None:
    """No deadline is waited for when the process is gone; a living owner's lease stays."""
    LeaseBook(ledger, dead_owner).acquire("box", "orphan", 3600)
    book.acquire("box", "mine", 3600)
    removed: list[str] = []
    report = book.reap({"box": lambda row: removed.append(row.ref)})
    assert removed == ["orphan"] == [row.ref for row in report.removed]
    assert [row.ref for row in book.held()] == ["mine"]


def test_pid_reuse_does_not_keep_a_lease(book: LeaseBook) -> None:
    """A process with the owner's pid but another start time is not the owner."""
    host, pid, start = process_owner().split(":")
    assert is_dead(f"{host}:{pid}:{int(start) + 1}")
    assert not is_dead(f"{host}:{pid}:{start}")


def test_remote_owner_lives_until_its_deadline(book: LeaseBook, ledger: Ledger) -> None:
    """Of another machine only the deadline is known."""
    LeaseBook(ledger, "other-host:1:1").acquire("box", "far", 100)
    assert book.expired() == []
    assert [row.ref for row in book.expired(now=time.time() + 200)] == ["far"]


def test_failing_handler_keeps_the_row(book: LeaseBook, ledger: Ledger, dead_owner: str) -> None:
    """The failure is reported, the others are handled, and the next reap tries again."""
    dead = LeaseBook(ledger, dead_owner)
    for ref in ("a", "b", "c"):
        dead.acquire("box", ref, 3600)
    dead.acquire("file", "f", 3600)

    def fail_on_b(row: LeaseRow) -> None:
        if row.ref == "b":
            raise OSError("device busy")

    report = book.reap({"box": fail_on_b})
    assert sorted(row.ref for row in report.removed) == ["a", "c"]
    assert [(row.ref, reason) for row, reason in report.failed] == [("b", "OSError: device busy")]
    assert [row.ref for row in report.unhandled] == ["f"]
    assert {row.owner for row in book.expired()} == {dead_owner}
    report = book.reap({"box": lambda row: None, "file": lambda row: None})
    assert sorted(row.ref for row in report.removed) == ["b", "f"]


def test_concurrent_reapers_share_the_work(ledger: Ledger, dead_owner: str) -> None:
    """Each row is handled by exactly one of several reapers."""
    dead = LeaseBook(ledger, dead_owner)
    for i in range(20):
        dead.acquire("box", str(i), 3600)
    handled: list[str] = []
    start = threading.Barrier(4)

    def reap() -> None:
        book = LeaseBook(ledger)
        start.wait(10)
        book.reap({"box": lambda row: handled.append(row.ref)})

    threads = [threading.Thread(target=reap) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(handled, key=int) == [str(i) for i in range(20)]


def test_reaper_that_dies_is_reaped(book: LeaseBook, ledger: Ledger, dead_owner: str) -> None:
    """A row that was claimed by a reaper which was killed is claimed again."""
    LeaseBook(ledger, f"{dead_owner}#reaper").acquire("box", "b", 3600)
    assert len(book.reap({"box": lambda row: None}).removed) == 1
