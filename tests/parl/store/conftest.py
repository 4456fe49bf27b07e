"""A ledger on each database the store runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.db.engine import Ledger, open_ledger
from parl.store import Store


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def ledger(request: pytest.FixtureRequest, tmp_path) -> Iterator[Ledger]:
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_server").new_database()
    else:
        url = f"sqlite:///{tmp_path}/ledger.db"
    ledger = open_ledger(url)
    yield ledger
    ledger.close()


@pytest.fixture
def store(ledger: Ledger) -> Store:
    """The store of a fresh run."""
    store = Store(ledger, "run-1")
    store.create_run(name="run", kind="rl", seed=3, config={"a": 1})
    return store
