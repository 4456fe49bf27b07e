"""The schema version: read it, and bring an old or empty database up to date under a lock."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import URL, Connection, Engine, text

from infra.db.errors import shown
from infra.db.models import Base
from infra.errors import LedgerError

SCHEMA_HEAD = "0005"
"""Revision id of the newest migration; a test holds it to infra/db/migrations."""

MIGRATIONS = Path(__file__).parent / "migrations"
_ADVISORY_LOCK = 0x5041524C  # "PARL"


def read_version(connection: Connection) -> str | None:
    """Revision of the database; None when it holds no ledger yet.

    LedgerError when tables of another program use our names.
    """
    names = _table_names(connection)
    if "alembic_version" in names:
        version = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
        if version is not None:
            return str(version)
    taken = sorted(names & set(Base.metadata.tables))
    if taken:
        raise LedgerError(
            f"ledger {shown(connection.engine.url)}: holds a table {taken[0]!r} that is not "
            "ours; expected an empty database or a ledger, so give another one"
        )
    return None


def check_version(version: str, url: URL) -> None:
    """LedgerError when the database was written by a newer PARL."""
    if version > SCHEMA_HEAD:
        raise LedgerError(
            f"ledger {shown(url)}: schema version {version} is newer than {SCHEMA_HEAD}, the "
            "newest this PARL knows; upgrade PARL or give another ledger"
        )


def migrate(engine: Engine) -> None:
    """Upgrade to SCHEMA_HEAD in one transaction; a second process waits and finds it done.

    ``engine`` must begin with a write lock on SQLite and not enforce foreign keys there, because
    a later migration may rebuild tables.
    """
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL lock_timeout = '60s'"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        version = read_version(connection)
        if version is not None:
            check_version(version, engine.url)
        if version != SCHEMA_HEAD:
            _upgrade(connection)


def _upgrade(connection: Connection) -> None:
    # alembic costs 100 ms to import; a current ledger never gets here
    from alembic import command

    command.upgrade(alembic_config(connection), "head")


def alembic_config(connection: Connection):
    """alembic Config over an open connection; used by migrations and their tests."""
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _table_names(connection: Connection) -> set[str]:
    if connection.dialect.name == "sqlite":
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
    else:
        # only the schema that unqualified names resolve to
        query = "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
    return set(connection.execute(text(query)).scalars())
