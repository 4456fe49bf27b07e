"""alembic's entry point. The caller (infra.db.schema) holds the connection and the lock."""

from alembic import context

from infra.db.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    # SQLite alters a table by rebuilding it
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
