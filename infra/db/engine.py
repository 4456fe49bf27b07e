"""open_ledger: a SQLite file or a PostgreSQL database behind the same two context managers.

    ledger = open_ledger(f"sqlite:///{run_dir}/ledger.db")
    with ledger.transaction() as session:   # all or nothing, at __exit__
        session.add(RunRow(...))
    with ledger.session() as session:       # a consistent snapshot, read-only
        run = session.get(RunRow, run_id)

SQLite: WAL, so readers never wait for the writer; writers queue at BEGIN IMMEDIATE, so none can
fail half way with "database is locked". A committed transaction survives ``kill -9``; with
``durable=True`` (synchronous=FULL) it survives a power cut too.
PostgreSQL: writers run READ COMMITTED, readers REPEATABLE READ READ ONLY.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sqlalchemy import URL, Engine, create_engine, event, exc, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from infra.db.errors import LedgerConflict, is_read_only, shown, translate, translate_sqlite
from infra.db.schema import SCHEMA_HEAD, check_version, migrate, read_version
from infra.errors import ConfigError, LedgerError

T = TypeVar("T")

_WRITE = "ledger_write"
BUSY_TIMEOUT_S = 30.0
_BEGIN_ATTEMPTS = 2
"""Waits of BUSY_TIMEOUT_S for the write lock before giving up."""


class Ledger:
    """An open ledger; safe to share between threads, pickles as its URL, survives a fork."""

    def __init__(self, url: URL, *, durable: bool, busy_timeout_s: float) -> None:
        self._url = url
        self._durable = durable
        self._busy_timeout_s = busy_timeout_s
        self.engine = _make_engine(url, durable=durable, busy_timeout_s=busy_timeout_s)
        self._writer = self.engine.execution_options(**{_WRITE: True})
        self._reader = self.engine
        if url.get_backend_name() == "postgresql":
            self._reader = self.engine.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"Ledger({shown(self._url)})"

    def __reduce__(self) -> tuple[Callable[..., Ledger], tuple[str, bool, bool, float]]:
        return (_reopen, (self.url, False, self._durable, self._busy_timeout_s))

    @property
    def url(self) -> str:
        """With the password; ``repr`` hides it."""
        return self._url.render_as_string(hide_password=False)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Read-only snapshot; a write in it raises. Rows stay readable after it."""
        with self._begun(self._reader) as session:
            try:
                yield session
            except exc.DBAPIError as error:
                if is_read_only(error):
                    raise LedgerError(
                        f"{self!r}: a write inside session(), which only reads; use transaction()"
                    ) from error
                raise

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Committed when the block ends, rolled back when it raises.

        LedgerConflict: nothing was written, run it again (``run`` does). LedgerError: disk full,
        read-only, server gone. IntegrityError and the like pass through.
        """
        with self._begun(self._writer) as session:
            yield session
            # apart from COMMIT, because only there a lost connection leaves the outcome open
            session.flush()
            try:
                session.commit()
            except exc.DBAPIError as error:
                raise translate(error, self._url, committing=True) or error from error

    def run(self, fn: Callable[[Session], T], *, attempts: int = 5) -> T:
        """``fn`` in a transaction, again on LedgerConflict; ``fn`` must be repeatable."""
        for attempt in range(1, attempts):
            try:
                with self.transaction() as session:
                    return fn(session)
            except LedgerConflict:
                time.sleep(0.05 * 2**attempt)
        with self.transaction() as session:
            return fn(session)

    def close(self) -> None:
        """Return every connection; the ledger may be used again (it reconnects)."""
        self.engine.dispose()

    @contextmanager
    def _begun(self, engine: Engine) -> Iterator[Session]:
        if os.getpid() != self._pid:
            # a forked child must not touch its parent's sockets and file locks
            self.engine.dispose(close=False)
            self._pid = os.getpid()
        session = self._begin(engine)
        try:
            yield session
        except exc.DBAPIError as error:
            ledger_error = translate(error, self._url)
            if ledger_error is None:
                raise
            raise ledger_error from error
        finally:
            session.close()

    def _begin(self, engine: Engine) -> Session:
        """A session that already holds its transaction (and the write lock on SQLite)."""
        for attempt in range(1, _BEGIN_ATTEMPTS + 1):
            session = Session(engine, expire_on_commit=False)
            try:
                session.connection()
            except exc.DBAPIError as error:
                session.close()
                ledger_error = translate(error, self._url)
                if ledger_error is None:
                    raise
                if attempt == _BEGIN_ATTEMPTS or not isinstance(ledger_error, LedgerConflict):
                    raise ledger_error from error
            else:
                return session
        raise AssertionError("unreachable: the last attempt returns or raises")


def open_ledger(
    url: str,
    *,
    create: bool = True,
    durable: bool = False,
    busy_timeout_s: float = BUSY_TIMEOUT_S,
) -> Ledger:
    """Open ``sqlite:///path`` or ``postgresql+psycopg://...`` and bring its schema up to date.

    create=False: the ledger must exist already. ConfigError: the URL is not one of these.
    LedgerError: no server, not writable, disk full, newer schema, not a ledger.
    Several processes may open a new or old ledger at once; one migrates, the others wait.
    """
    parsed = parse_url(url)
    fresh = _prepare_file(parsed, create)
    ledger = Ledger(parsed, durable=durable, busy_timeout_s=busy_timeout_s)
    try:
        version = None
        if not fresh:
            with ledger.engine.connect() as connection:
                version = read_version(connection)
        if version is None and not create:
            raise LedgerError(f"ledger {shown(parsed)}: the database holds no ledger")
        if version is not None:
            check_version(version, parsed)
        if version != SCHEMA_HEAD:
            _migrate(parsed, busy_timeout_s)
    except exc.DBAPIError as error:
        ledger.close()
        raise translate(error, parsed) or error from error
    except LedgerError:
        ledger.close()
        raise
    return ledger


def _reopen(url: str, create: bool, durable: bool, busy_timeout_s: float) -> Ledger:
    return open_ledger(url, create=create, durable=durable, busy_timeout_s=busy_timeout_s)


def parse_url(text: str) -> URL:
    """The URL of a ledger, checked; ConfigError, which hides a password."""
    expected = "expected sqlite:///PATH or postgresql+psycopg://USER@HOST/DATABASE"
    try:
        url = make_url(text)
    except (exc.ArgumentError, ValueError):
        # the text may hold a password that no parser found: it is not repeated
        place = text.partition("@")[2] or text
        raise ConfigError(f"ledger URL ...{place!r} is not a URL; {expected}") from None
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("sqlite", "postgresql+psycopg"):
        raise ConfigError(f"ledger URL {shown(url)} is of kind {url.drivername!r}; {expected}")
    if url.drivername == "sqlite" and url.database in (None, "", ":memory:"):
        raise ConfigError(f"ledger URL {text!r} is in memory; other processes need a file")
    return url


def absolute_url(text: str) -> str:
    """The URL with the path of a SQLite file made absolute; others and "" as they are."""
    url = parse_url(text) if text else None
    if url is None or url.drivername != "sqlite" or str(url.database).startswith("file:"):
        return text
    return url.set(database=str(Path(str(url.database)).absolute())).render_as_string(False)


def shown_url(text: str) -> str:
    """The URL with its password hidden; "" and a URL without one as they are."""
    return shown(parse_url(text)) if "@" in text else text


def _prepare_file(url: URL, create: bool) -> bool:
    """Make the folder of a SQLite file; True when there is no such file yet."""
    if url.drivername != "sqlite" or str(url.database).startswith("file:"):
        return False
    path = Path(str(url.database))
    if path.is_file() and path.stat().st_size:
        return False
    if not create:
        raise LedgerError(f"ledger {path}: no such file; start a run first or correct the path")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LedgerError(f"ledger {path}: cannot make its folder: {error.strerror}") from error
    return True


def _make_engine(
    url: URL, *, durable: bool, busy_timeout_s: float, migrating: bool = False
) -> Engine:
    if url.get_backend_name() == "postgresql":
        pool = {"poolclass": NullPool} if migrating else {"pool_pre_ping": True}
        return create_engine(url, connect_args={"connect_timeout": 10}, **pool)
    engine = create_engine(url, poolclass=NullPool) if migrating else create_engine(url)

    @event.listens_for(engine, "connect")
    def _configure(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        # sqlite3 must not begin transactions on its own: our begin hook does
        connection.isolation_level = None  # pyright: ignore[reportAttributeAccessIssue]
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {round(busy_timeout_s * 1000)}")
        cursor.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        cursor.execute(f"PRAGMA foreign_keys = {'OFF' if migrating else 'ON'}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection) -> None:
        write = migrating or connection.get_execution_options().get(_WRITE, False)
        connection.exec_driver_sql(f"PRAGMA query_only = {'OFF' if write else 'ON'}")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    @event.listens_for(engine, "checkin")
    def _end(connection: DBAPIConnection | None, _: ConnectionPoolEntry) -> None:
        # SQLite keeps a transaction open whose COMMIT failed; SQLAlchemy takes it for ended
        if connection is not None and connection.in_transaction:  # pyright: ignore[reportAttributeAccessIssue]
            connection.rollback()

    return engine


def _migrate(url: URL, busy_timeout_s: float) -> None:
    engine = _make_engine(url, durable=True, busy_timeout_s=busy_timeout_s, migrating=True)
    if url.get_backend_name() == "sqlite":
        _use_wal(engine, time.monotonic() + busy_timeout_s)
    migrate(engine)


def _use_wal(engine: Engine, deadline: float) -> None:
    """WAL is a property of the file. Switching ignores busy_timeout, hence the loop."""
    while True:
        connection = engine.raw_connection()
        try:
            connection.cursor().execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.Error as error:
            ledger_error = translate_sqlite(error, engine.url)
            if ledger_error is None:
                raise
            if not isinstance(ledger_error, LedgerConflict) or time.monotonic() > deadline:
                raise ledger_error from error
            time.sleep(0.02)
        finally:
            connection.close()
