"""The ledger's engine: transactions, errors, concurrency, crashes. Both databases."""

import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import exc, func, select, text

from infra.db.engine import Ledger, open_ledger
from infra.db.errors import LedgerConflict
from infra.db.models import EventRow, RunRow
from infra.errors import ConfigError, LedgerError

ROOT = Path(__file__).parents[2]


def make_run(run_id: str = "r") -> RunRow:
    return RunRow(id=run_id, name="n", kind="rl", status="running", seed=7)


def count_events(ledger: Ledger) -> int:
    with ledger.session() as session:
        return session.scalar(select(func.count()).select_from(EventRow)) or 0


def spawn(code: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_transaction_commits_and_rows_stay_readable(ledger: Ledger) -> None:
    """What a transaction wrote is there afterwards; rows outlive their session."""
    with ledger.transaction() as session:
        session.add(make_run())
    with ledger.session() as session:
        run = session.get_one(RunRow, "r")
    assert (run.seed, run.status, run.config_json) == (7, "running", {})
    assert run.created_at <= time.time()


def test_exception_rolls_everything_back(ledger: Ledger) -> None:
    """A block that raises leaves no trace, not even of flushed rows."""
    with pytest.raises(ZeroDivisionError), ledger.transaction() as session:
        session.add(make_run())
        session.flush()
        _ = 1 / 0
    with ledger.session() as session:
        assert session.get(RunRow, "r") is None


def test_foreign_keys_are_checked_at_commit(ledger: Ledger) -> None:
    """Children may be inserted before their parent, but never without it."""
    with ledger.transaction() as session:
        session.add(EventRow(run_id="r", round_index=0, kind="gate"))
        session.flush()
        session.add(make_run())
    with pytest.raises(exc.IntegrityError), ledger.transaction() as session:
        session.add(EventRow(run_id="nobody", round_index=0, kind="gate"))
    assert count_events(ledger) == 1


def test_session_is_read_only(ledger: Ledger) -> None:
    """A write inside session() raises and says which context manager writes."""
    expected = pytest.raises(LedgerError, match=r"which only reads; use transaction\(\)")
    with expected, ledger.session() as session:
        session.add(make_run())
        session.flush()
    with ledger.transaction() as session:
        session.add(make_run())


def test_session_sees_one_snapshot(ledger: Ledger) -> None:
    """A reader neither blocks a writer nor sees what it commits meanwhile."""
    with ledger.transaction() as session:
        session.add(make_run())
    count = select(func.count()).select_from(EventRow)
    with ledger.session() as reader:
        assert reader.scalar(count) == 0
        with ledger.transaction() as writer:
            writer.add(EventRow(run_id="r", round_index=0, kind="gate"))
        assert reader.scalar(count) == 0
    assert count_events(ledger) == 1


def test_run_repeats_after_a_conflict(ledger: Ledger) -> None:
    """run() tries a transaction again when it lost to another one, and gives up in the end."""
    tries = []

    def flaky(session) -> str:
        tries.append(1)
        session.add(make_run(f"r{len(tries)}"))
        if len(tries) < 3:
            raise LedgerConflict("another one was first")
        return "done"

    assert ledger.run(flaky) == "done"
    with ledger.session() as session:
        assert session.scalars(select(RunRow.id)).all() == ["r3"]
    tries.clear()
    with pytest.raises(LedgerConflict):
        ledger.run(flaky, attempts=2)


def test_a_deadlock_is_a_conflict_that_run_cures(ledger: Ledger) -> None:
    """Two writers that lock rows in opposite order both succeed through run()."""
    with ledger.transaction() as session:
        session.add_all([make_run("a"), make_run("b")])
    barrier = threading.Barrier(2)

    def touch(first: str, second: str) -> None:
        met = []

        def body(session) -> None:
            for run_id in (first, second):
                session.get_one(RunRow, run_id, with_for_update=True).status = "done"
                session.flush()
                if not met and ledger.engine.dialect.name == "postgresql":
                    met.append(barrier.wait(10))

        ledger.run(body)

    threads = [threading.Thread(target=touch, args=pair) for pair in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    with ledger.session() as session:
        assert session.scalars(select(RunRow.status)).all() == ["done", "done"]


WRITER = """
    import sys
    from infra.db.engine import open_ledger
    from infra.db.models import EventRow
    url, name, count = sys.argv[1:]
    ledger = open_ledger(url)
    for i in range(int(count)):
        with ledger.transaction() as session:
            session.add(EventRow(run_id="r", round_index=i, kind=name))
        print(i, flush=True)
"""


def test_processes_write_at_once(ledger: Ledger) -> None:
    """Four processes of small transactions: none fails, nothing is lost."""
    with ledger.transaction() as session:
        session.add(make_run())
    writers = [spawn(WRITER, ledger.url, f"w{i}", "100") for i in range(4)]
    for writer in writers:
        _, stderr = writer.communicate(timeout=60)
        assert writer.returncode == 0, stderr
    assert count_events(ledger) == 400


def test_committed_rows_survive_kill(ledger: Ledger) -> None:
    """Every transaction that was reported committed is there after kill -9 of the writer."""
    with ledger.transaction() as session:
        session.add(make_run())
    writer = spawn(WRITER, ledger.url, "w", "1000000")
    assert writer.stdout is not None
    seen = [int(writer.stdout.readline()) for _ in range(50)]
    writer.kill()
    # not communicate(): it reads the pipe itself and would miss lines that readline() took ahead
    rest = writer.stdout.read()
    writer.wait()
    seen += [int(line) for line in rest.splitlines() if line.strip().isdigit()]
    stored = count_events(ledger)
    assert stored in (len(seen), len(seen) + 1)


def test_processes_create_at_once(ledger_url: str) -> None:
    """Several processes may open a ledger that does not exist yet."""
    code = """
        import sys
        from infra.db.engine import open_ledger
        from infra.db.models import RunRow
        with open_ledger(sys.argv[1]).transaction() as session:
            session.add(RunRow(id=sys.argv[2], name="n", kind="k", status="s", seed=1))
    """
    openers = [spawn(code, ledger_url, str(i)) for i in range(4)]
    for opener in openers:
        _, stderr = opener.communicate(timeout=60)
        assert opener.returncode == 0, stderr
    with open_ledger(ledger_url, create=False).session() as session:
        assert session.scalar(select(func.count()).select_from(RunRow)) == 4


def test_opening_a_current_ledger_is_cheap(ledger: Ledger) -> None:
    """No migration machinery is imported, and opening takes milliseconds."""
    code = """
        import sys, time
        from infra.db.engine import open_ledger
        open_ledger(sys.argv[1]).close()
        start = time.perf_counter()
        open_ledger(sys.argv[1]).close()
        print(time.perf_counter() - start, "alembic" in sys.modules)
    """
    opener = spawn(code, ledger.url)
    stdout, stderr = opener.communicate(timeout=60)
    assert opener.returncode == 0, stderr
    elapsed, alembic = stdout.split()
    assert alembic == "False"
    assert float(elapsed) < 0.1  # 2-15 ms on an idle machine; the CI cores are shared


def test_ledger_pickles_as_its_url(ledger: Ledger) -> None:
    """An actor can be handed a ledger."""
    with ledger.transaction() as session:
        session.add(make_run())
    copy = pickle.loads(pickle.dumps(ledger))
    with copy.session() as session:
        assert session.get(RunRow, "r") is not None
    copy.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_ledger_survives_a_fork(ledger: Ledger) -> None:
    """A forked child opens connections of its own and leaves its parent's alone."""
    with ledger.transaction() as session:
        session.add(make_run())
    child = os.fork()
    if child == 0:
        with ledger.transaction() as session:
            session.add(EventRow(run_id="r", round_index=0, kind="child"))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert count_events(ledger) == 1


def test_newer_schema_is_refused(ledger: Ledger) -> None:
    """A ledger of a later PARL is not touched."""
    with ledger.transaction() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(LedgerError, match="schema version 9999 is newer than"):
        open_ledger(ledger.url)


def test_foreign_tables_are_refused(ledger_url: str) -> None:
    """A database whose tables use our names but are not ours is not touched."""
    ledger = open_ledger(ledger_url)
    with ledger.transaction() as session:
        session.execute(text("DROP TABLE alembic_version"))
    ledger.close()
    with pytest.raises(LedgerError, match="holds a table 'episode' that is not ours"):
        open_ledger(ledger_url)


@pytest.mark.parametrize(
    "url, expected",
    [
        ("nonsense", "is not a URL"),
        ("mysql://host/db", "is of kind 'mysql'; expected sqlite:///PATH"),
        ("sqlite://", "is in memory; other processes need a file"),
    ],
)
def test_wrong_urls(url: str, expected: str) -> None:
    """A URL that cannot be a ledger is the user's mistake."""
    with pytest.raises(ConfigError, match=expected):
        open_ledger(url)


def test_create_false_needs_a_ledger(ledger_url: str) -> None:
    """A reader does not bring a ledger into being."""
    with pytest.raises(LedgerError, match=r"no such file|holds no ledger"):
        open_ledger(ledger_url, create=False)
