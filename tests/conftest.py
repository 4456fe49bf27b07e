"""Fixtures every test folder shares."""

import os

# Before anything imports torch: tests share few cores, and idle OpenMP threads must not spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.postgres import PostgresServer, find_binaries

# Wall time says nothing on a shared machine (pytest-timeout catches what hangs), and CI must not
# fail by the luck of a draw: elsewhere every run draws anew.
settings.register_profile(
    "parl",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("parl")


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
