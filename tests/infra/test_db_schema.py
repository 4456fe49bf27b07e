"""Schema and column types: migrations equal models, values come back bit for bit."""

import math
import struct

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import exc, text

from infra.db.engine import Ledger
from infra.db.models import Base, EpisodeRow, RunRow, TurnRow
from infra.db.schema import SCHEMA_HEAD, alembic_config
from infra.db.types import escape_text, unescape_text

ANY_TEXT = st.text(st.characters(exclude_categories=[]), max_size=30)


def add_episode(ledger: Ledger, **fields: object) -> EpisodeRow:
    """Store one episode of run "r" in place of the one before and read it back."""
    with ledger.transaction() as session:
        session.merge(RunRow(id="r", name="n", kind="k", status="s", seed=2**63 - 1))
        session.execute(text("DELETE FROM episode"))
        keys = {"phase": "train", "round_index": 0, "task_index": 0, "sample": 0}
        session.add(EpisodeRow(id="e", run_id="r", task_name="t", task_type="a", **keys, **fields))
    with ledger.session() as session:
        return session.get_one(EpisodeRow, "e")


def test_migrated_schema_equals_models(ledger: Ledger) -> None:
    """alembic finds nothing to change between the migrated database and the models."""
    with ledger.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_head_is_the_newest_migration(ledger: Ledger) -> None:
    """SCHEMA_HEAD, which spares opening the migrations, names the newest of them."""
    with ledger.engine.connect() as connection:
        script = ScriptDirectory.from_config(alembic_config(connection))
    assert script.get_heads() == [SCHEMA_HEAD]


def test_downgrade_leaves_nothing(ledger: Ledger) -> None:
    """The first migration can be undone."""
    from alembic import command

    with ledger._writer.begin() as connection:
        command.downgrade(alembic_config(connection), "base")
        context = MigrationContext.configure(connection)
        tables = {
            op[1].name for op in compare_metadata(context, Base.metadata) if op[0] == "add_table"
        }
    assert tables == set(Base.metadata.tables)


@given(ANY_TEXT)
def test_escaping_is_lossless(value: str) -> None:
    """Any text survives; what is stored has neither NUL nor surrogates."""
    stored = escape_text(value)
    assert unescape_text(stored) == value
    assert "\0" not in stored
    stored.encode()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    value=st.floats(allow_nan=False),
    words=ANY_TEXT,
    units=st.dictionaries(ANY_TEXT, st.floats(allow_nan=False), max_size=3),
)
def test_values_round_trip(
    ledger: Ledger, value: float, words: str, units: dict[str, float]
) -> None:
    """Floats come back with the same bits, text with the same characters."""
    row = add_episode(ledger, reward=value, final_text=words, budget_units_json=units)
    assert row.reward is not None
    assert struct.pack("d", row.reward) == struct.pack("d", value)
    assert row.final_text == words
    assert row.budget_units_json == units


def test_json_keeps_nan_and_none(ledger: Ledger) -> None:
    """JSON columns hold what Python's json can write, NaN included."""
    row = add_episode(ledger, verdict_json={"nan": math.nan, "none": None})
    assert math.isnan(row.verdict_json["nan"])
    assert row.verdict_json["none"] is None


def test_states_are_checked(ledger: Ledger) -> None:
    """A state outside the contract is refused by the database."""
    with pytest.raises(exc.IntegrityError):
        add_episode(ledger, state="forgotten")


def test_same_draw_twice_is_refused(ledger: Ledger) -> None:
    """(run, phase, round, task, sample) names one episode."""
    add_episode(ledger)
    with pytest.raises(exc.IntegrityError), ledger.transaction() as session:
        keys = {"phase": "train", "round_index": 0, "task_index": 0, "sample": 0}
        session.add(EpisodeRow(id="f", run_id="r", task_name="t", task_type="a", **keys))


def test_turns_go_with_their_episode(ledger: Ledger) -> None:
    """Deleting an episode deletes what hangs on it."""
    add_episode(ledger)
    with ledger.transaction() as session:
        session.add(
            TurnRow(
                episode_id="e",
                index=0,
                weight_version=0,
                finish="stop",
                sampled_ids=b"\0\1",
                logprobs=b"",
                loss_mask=b"",
            )
        )
    with ledger.transaction() as session:
        session.execute(text("DELETE FROM episode"))
    with ledger.session() as session:
        assert session.get(TurnRow, ("e", 0)) is None
