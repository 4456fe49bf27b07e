"""Published tasks: when, and the folder as it was; who signed a certificate."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("task", sa.Column("published_at", sa.Double(), nullable=True))
    op.add_column("task", sa.Column("archive", sa.LargeBinary(), nullable=True))
    op.add_column(
        "task_certificate",
        sa.Column("public_key", sa.String(), nullable=False, server_default=""),
    )


def downgrade() -> None:
    op.drop_column("task_certificate", "public_key")
    op.drop_column("task", "archive")
    op.drop_column("task", "published_at")
