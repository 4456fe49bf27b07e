"""What each database says when its disk, file or server fails: one clear line, nothing lost."""

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import func, select, text

from infra.db.engine import open_ledger
from infra.db.errors import LedgerConflict
from infra.db.models import EventRow, RunRow
from infra.errors import LedgerError
from tests.postgres import PostgresServer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A SQLite ledger with one run."""
    path = tmp_path / "ledger.db"
    ledger = open_ledger(f"sqlite:///{path}")
    with ledger.transaction() as session:
        session.add(RunRow(id="r", name="n", kind="k", status="s", seed=1))
    ledger.close()
    return path


def test_full_disk_loses_nothing(path: Path) -> None:
    """The transaction that does not fit is rolled back whole; the ledger goes on afterwards."""
    ledger = open_ledger(f"sqlite:///{path}")
    expected = pytest.raises(LedgerError, match="disk is full; free space")
    with expected as caught, ledger.transaction() as session:
        # SQLite's own quota: the same SQLITE_FULL that a full file system gives
        pages = session.scalar(text("PRAGMA page_count"))
        session.execute(text(f"PRAGMA max_page_count = {pages + 1}"))
        for i in range(200):
            session.add(EventRow(run_id="r", round_index=i, kind="k", key="x" * 1000))
    assert "\n" not in str(caught.value)
    with ledger.transaction() as session:
        session.execute(text("PRAGMA max_page_count = 1000000"))
        session.add(EventRow(run_id="r", round_index=0, kind="k"))
    with ledger.session() as session:
        assert session.scalar(select(func.count()).select_from(EventRow)) == 1
    ledger.close()


def test_read_only_file(path: Path) -> None:
    """A file that cannot be written can be read, and a write says so."""
    ledger = open_ledger(f"sqlite:///file:{path}?mode=ro&uri=true")
    with ledger.session() as session:
        assert session.get(RunRow, "r") is not None
    expected = pytest.raises(LedgerError, match="the file is read-only; make it")
    with expected, ledger.transaction() as session:
        session.add(EventRow(run_id="r", round_index=0, kind="k"))
    ledger.close()


def test_file_that_is_no_database(tmp_path: Path) -> None:
    """A path that names something else is left as it is."""
    path = tmp_path / "notes.txt"
    path.write_text("not a database\n" * 100)
    with pytest.raises(LedgerError, match="not a SQLite database; give another path"):
        open_ledger(f"sqlite:///{path}")
    assert path.read_text() == "not a database\n" * 100


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """The message names the path and the reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot make its folder"):
        open_ledger(f"sqlite:///{tmp_path}/file/sub/ledger.db")


def test_a_writer_that_never_ends(path: Path) -> None:
    """Waiting for the write lock is bounded and ends in a conflict that names the cause."""
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    ledger = open_ledger(f"sqlite:///{path}", busy_timeout_s=0.1)
    with pytest.raises(LedgerConflict, match="locked by another process"), ledger.transaction():
        pass
    holder.rollback()
    holder.close()
    with ledger.transaction() as session:
        session.add(EventRow(run_id="r", round_index=0, kind="k"))
    ledger.close()


def test_durable_means_synchronous_full(path: Path) -> None:
    """durable=True asks SQLite for an fsync a transaction; the default leaves it to the kernel."""
    for durable, expected in ((False, 1), (True, 2)):
        ledger = open_ledger(f"sqlite:///{path}", durable=durable)
        with ledger.session() as session:
            assert session.scalar(text("PRAGMA synchronous")) == expected
            assert session.scalar(text("PRAGMA journal_mode")) == "wal"
        ledger.close()


def test_no_server() -> None:
    """A PostgreSQL server that is not there: the URL without its password, and what to do."""
    with pytest.raises(LedgerError, match="no server answers; start it or correct") as caught:
        open_ledger("postgresql://user:secret@127.0.0.1:1/db")
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.postgres
def test_no_such_database(postgres_url: str) -> None:
    """The server is there, the database is not."""
    url = postgres_url.replace("/test", "/missing")
    with pytest.raises(LedgerError, match="does not exist"):
        open_ledger(url)


@pytest.mark.postgres
def test_server_restart(postgres_server: PostgresServer) -> None:
    """A broken connection is a conflict that run() cures once the server is back."""
    ledger = open_ledger(postgres_server.new_database())
    tries: list[int] = []

    def body(session) -> None:
        tries.append(1)
        session.add(RunRow(id="r", name="n", kind="k", status="s", seed=1))
        session.flush()
        if len(tries) == 1:
            postgres_server.stop()
            postgres_server.start()
        session.add(EventRow(run_id="r", round_index=0, kind="k"))

    ledger.run(body)
    with ledger.session() as session:
        assert session.scalar(select(func.count()).select_from(EventRow)) == 1
    assert len(tries) == 2
    ledger.close()


@pytest.mark.postgres
def test_read_only_server(postgres_server: PostgresServer) -> None:
    """A standby is named as such."""
    url = postgres_server.new_database()
    ledger = open_ledger(url)
    with ledger.transaction() as session:
        name = session.scalar(text("SELECT current_database()"))
    with postgres_server.admin() as admin:
        admin.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    ledger.close()
    with pytest.raises(LedgerError, match="read-only"), ledger.transaction() as session:
        session.add(RunRow(id="r", name="n", kind="k", status="s", seed=1))
    ledger.close()
