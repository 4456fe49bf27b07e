"""Database errors as one clear line; which of them a retry can cure.

    LedgerError
    └── LedgerConflict   another transaction was in the way, or the connection broke before COMMIT

IntegrityError and other mistakes of the caller are not translated.
"""

from __future__ import annotations

import sqlite3

import psycopg
from sqlalchemy import URL, exc

from infra.errors import LedgerError


class LedgerConflict(LedgerError):
    """Nothing was written; the same transaction may succeed when it is run again."""


# SQLSTATE: serialization failure, deadlock, lock timeout, statement timeout
_PG_CONFLICTS = {"40001", "40P01", "55P03"}
_PG_CAUSES = {
    "53100": "the server's disk is full; free space there, committed data is intact",
    "25006": "the server is read-only (a standby?); give the URL of the primary",
    "42501": "this user lacks a privilege; grant CREATE on the schema and ownership of the tables",
    "3D000": "no such database; create it with `createdb`",
    "28P01": "the password is wrong; set it in the URL or in PGPASSWORD",
    "28000": "the server does not let this user in; check pg_hba.conf",
    "53300": "the server has no free connection; raise max_connections or use fewer workers",
}
_SQLITE_CONFLICTS = ("SQLITE_BUSY", "SQLITE_LOCKED")
_SQLITE_CAUSES = {
    "SQLITE_FULL": "the disk is full; free space, committed data is intact",
    "SQLITE_READONLY": "the file is read-only; make it and its folder writable",
    "SQLITE_IOERR": "the disk failed to read or write (full, quota or hardware)",
    "SQLITE_CANTOPEN": "the file cannot be opened; check that the path exists and is writable",
    "SQLITE_CORRUPT": "the file is damaged; restore it from a copy",
    "SQLITE_NOTADB": "the file is not a SQLite database; give another path",
    "SQLITE_PERM": "access to the file is denied; check its owner",
}


def shown(url: URL) -> str:
    """The URL without its password, for messages."""
    return url.render_as_string(hide_password=True)


def is_read_only(error: exc.DBAPIError) -> bool:
    """The database refused a write because the transaction, file or server is read-only."""
    orig = error.orig
    if isinstance(orig, psycopg.Error):
        return orig.sqlstate == "25006"
    return getattr(orig, "sqlite_errorname", "").startswith("SQLITE_READONLY")


def translate(error: exc.DBAPIError, url: URL, *, committing: bool = False) -> LedgerError | None:
    """The LedgerError for a failure of the database; None for a mistake of the caller."""
    if isinstance(error, exc.IntegrityError | exc.DataError):
        return None
    orig = error.orig
    reason = str(orig).strip().splitlines()[0] if str(orig).strip() else type(orig).__name__
    where = f"ledger {shown(url)}"
    if isinstance(orig, sqlite3.Error):
        return translate_sqlite(orig, url)
    if isinstance(orig, psycopg.Error):
        return _translate_postgres(orig, where, reason, error.connection_invalidated, committing)
    return None


def translate_sqlite(orig: sqlite3.Error, url: URL) -> LedgerError | None:
    """The same for an error straight from sqlite3."""
    where = f"ledger {shown(url)}"
    code: str = getattr(orig, "sqlite_errorname", "")  # absent on errors of the module itself
    if code.startswith(_SQLITE_CONFLICTS):
        return LedgerConflict(f"{where}: locked by another process ({orig}); try again later")
    for prefix, cause in _SQLITE_CAUSES.items():
        if code.startswith(prefix):
            return LedgerError(f"{where}: {cause} ({orig})")
    return None


def _translate_postgres(
    orig: psycopg.Error, where: str, reason: str, broken: bool, committing: bool
) -> LedgerError | None:
    state = orig.sqlstate
    if state in _PG_CONFLICTS:
        return LedgerConflict(f"{where}: another transaction was in the way ({reason})")
    if state in _PG_CAUSES:
        return LedgerError(f"{where}: {_PG_CAUSES[state]} ({reason})")
    if broken and committing:
        return LedgerError(
            f"{where}: the connection broke during COMMIT, so the outcome is unknown ({reason}); "
            "resume the run, it reads what was committed"
        )
    if broken:
        return LedgerConflict(f"{where}: the connection broke before COMMIT ({reason})")
    if isinstance(orig, psycopg.OperationalError):
        if state is None and "does not exist" in reason:
            return LedgerError(f"{where}: {reason}; create it first, or correct the URL")
        if state is None:
            return LedgerError(
                f"{where}: no server answers; start it or correct the URL ({reason})"
            )
        return LedgerError(f"{where}: {reason}")
    return None
