"""What each turn's queries read in hybrid attention."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

COUNTS = ("warm_reads", "retrieved")


def upgrade() -> None:
    op.add_column("turn", sa.Column("selections", sa.LargeBinary(), nullable=True))
    op.add_column("turn", sa.Column("selections_shape", sa.String(), nullable=True))
    for name in COUNTS:
        op.add_column("turn", sa.Column(name, sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    for name in ("selections", "selections_shape", *COUNTS):
        op.drop_column("turn", name)
