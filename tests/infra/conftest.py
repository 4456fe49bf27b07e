"""Ledgers of both kinds for the tests of infra."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.db.engine import Ledger, open_ledger

POSTGRES = pytest.param("postgresql", marks=pytest.mark.postgres)


@pytest.fixture(params=["sqlite", POSTGRES])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database that does not exist (SQLite) or is empty (PostgreSQL)."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'run' / 'ledger.db'}"
    return request.getfixturevalue("postgres_server").new_database()


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    opened = open_ledger(ledger_url)
    yield opened
    opened.close()
