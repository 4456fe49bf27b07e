"""The limits that each episode's sandbox enforced."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "episode", sa.Column("sandbox_json", sa.Text(), nullable=False, server_default="{}")
    )


def downgrade() -> None:
    op.drop_column("episode", "sandbox_json")
