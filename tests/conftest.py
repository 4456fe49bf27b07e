"""Fixtures every test folder shares."""

import os

# Before anything imports torch: tests share few cores, and idle OpenMP threads must not spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Iterator

import pytest

from tests.postgres import PostgresServer, find_binaries


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A real PostgreSQL server of this test session, on a unix socket in a temporary folder."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL binaries (apt-get install postgresql)")
    with PostgresServer(binaries) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_url(postgres_server: PostgresServer) -> str:
    """URL of an empty database; tests that write want ``postgres_server.new_database()``."""
    return postgres_server.new_database()
