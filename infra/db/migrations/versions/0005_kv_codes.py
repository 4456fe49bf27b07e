"""The codes of keys and values that each turn's engine step made."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("turn", sa.Column("codes", sa.LargeBinary(), nullable=True))
    op.add_column("turn", sa.Column("codes_shape", sa.String(), nullable=True))
    op.add_column(
        "turn", sa.Column("codes_start", sa.Integer(), nullable=False, server_default="1")
    )


def downgrade() -> None:
    for name in ("codes", "codes_shape", "codes_start"):
        op.drop_column("turn", name)
