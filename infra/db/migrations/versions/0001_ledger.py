"""The first schema: runs, tasks, episodes and their tokens, leases, events."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = (
    "lease",
    "reward_part",
    "tool_call",
    "turn",
    "episode",
    "task_type_stats",
    "task_certificate",
    "task",
    "event",
    "weight_version",
    "round",
    "run",
)


def _foreign(
    column: str, table: str, name: str, ondelete: str | None = "CASCADE"
) -> sa.ForeignKeyConstraint:
    """Checked at commit, so that rows of one transaction may come in any order."""
    return sa.ForeignKeyConstraint(
        [column],
        [f"{table}.id"],
        name=op.f(name),
        ondelete=ondelete,
        initially="DEFERRED",
        deferrable=True,
    )


def upgrade() -> None:
    _create_runs()
    _create_tasks()
    _create_episodes()
    _create_episode_parts()
    _create_leases()


def downgrade() -> None:
    for table in TABLES:
        op.drop_table(table)


def _create_runs() -> None:
    op.create_table(
        "run",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("config_json", sa.Text(), nullable=False),
        sa.Column("config_hash", sa.String(), nullable=False),
        sa.Column("code_commit", sa.String(), nullable=False),
        sa.Column("run_dir", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run")),
    )
    op.create_table(
        "round",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("phase", sa.String(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("stage", sa.Integer(), nullable=True),
        sa.Column("weight_version_in", sa.Integer(), nullable=True),
        sa.Column("weight_version_out", sa.Integer(), nullable=True),
        sa.Column("checkpoint_path", sa.Text(), nullable=True),
        sa.Column("checkpoint_hash", sa.String(), nullable=True),
        sa.Column("metrics_json", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.CheckConstraint(
            "status IN ('issued', 'collected', 'scored', 'trained', 'committed')",
            name=op.f("ck_round_status"),
        ),
        _foreign("run_id", "run", "fk_round_run_id_run"),
        sa.PrimaryKeyConstraint("run_id", "phase", "index", name=op.f("pk_round")),
    )
    op.create_table(
        "weight_version",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("checksum", sa.String(), nullable=False),
        sa.Column("path", sa.Text(), nullable=True),
        sa.Column("round_index", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        _foreign("run_id", "run", "fk_weight_version_run_id_run"),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("pk_weight_version")),
    )
    op.create_table(
        "event",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("round_index", sa.Integer(), nullable=False),
        sa.Column("task_index", sa.Integer(), nullable=True),
        sa.Column("sample", sa.Integer(), nullable=True),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("data_json", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        _foreign("run_id", "run", "fk_event_run_id_run"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event")),
    )
    op.create_index(
        op.f("ix_event_run_id_kind_round_index"), "event", ["run_id", "kind", "round_index"]
    )


def _create_tasks() -> None:
    op.create_table(
        "task",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("task_type", sa.String(), nullable=False),
        sa.Column("spec_json", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_task")),
    )
    op.create_index(op.f("ix_task_name"), "task", ["name"])
    op.create_table(
        "task_certificate",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("task_id", sa.String(), nullable=False),
        sa.Column("signature", sa.String(), nullable=False),
        sa.Column("report_json", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        _foreign("task_id", "task", "fk_task_certificate_task_id_task"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_task_certificate")),
    )
    op.create_index(op.f("ix_task_certificate_task_id"), "task_certificate", ["task_id"])
    op.create_table(
        "task_type_stats",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("round_index", sa.Integer(), nullable=False),
        sa.Column("task_type", sa.String(), nullable=False),
        sa.Column("num_episodes", sa.Integer(), nullable=False),
        sa.Column("num_scored", sa.Integer(), nullable=False),
        sa.Column("num_correct", sa.Integer(), nullable=False),
        sa.Column("mean_tokens", sa.Double(), nullable=False),
        sa.Column("tokens_per_solved", sa.Double(), nullable=True),
        sa.Column("gate_open", sa.Boolean(), nullable=False),
        sa.Column("metrics_json", sa.Text(), nullable=False),
        _foreign("run_id", "run", "fk_task_type_stats_run_id_run"),
        sa.PrimaryKeyConstraint(
            "run_id", "round_index", "task_type", name=op.f("pk_task_type_stats")
        ),
    )


def _create_episodes() -> None:
    op.create_table(
        "episode",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("phase", sa.String(), nullable=False),
        sa.Column("round_index", sa.Integer(), nullable=False),
        sa.Column("task_index", sa.Integer(), nullable=False),
        sa.Column("sample", sa.Integer(), nullable=False),
        sa.Column("task_name", sa.String(), nullable=False),
        sa.Column("task_type", sa.String(), nullable=False),
        sa.Column("task_id", sa.String(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("drop_reason", sa.Text(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.Column("correctness", sa.Double(), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("reward_reasons_json", sa.Text(), nullable=False),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.Column("num_turns", sa.Integer(), nullable=False),
        sa.Column("num_calls", sa.Integer(), nullable=False),
        sa.Column("budget", sa.Double(), nullable=True),
        sa.Column("budget_units_json", sa.Text(), nullable=False),
        sa.Column("min_tokens", sa.Integer(), nullable=True),
        sa.Column("max_tokens", sa.Integer(), nullable=True),
        sa.Column("stage", sa.Integer(), nullable=True),
        sa.Column("weight_version", sa.Integer(), nullable=True),
        sa.Column("draw_json", sa.Text(), nullable=False),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=True),
        sa.Column("verdict_json", sa.Text(), nullable=False),
        sa.Column("final_text", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("formula_version", sa.String(), nullable=True),
        sa.Column("worker", sa.String(), nullable=True),
        sa.Column("elapsed_s", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.CheckConstraint(
            "state IN ('issued', 'running', 'finished', 'scored', 'trained', 'dropped')",
            name=op.f("ck_episode_state"),
        ),
        _foreign("run_id", "run", "fk_episode_run_id_run"),
        _foreign("task_id", "task", "fk_episode_task_id_task", ondelete=None),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_episode")),
        sa.UniqueConstraint(
            "run_id",
            "phase",
            "round_index",
            "task_index",
            "sample",
            name=op.f("uq_episode_run_id_phase_round_index_task_index_sample"),
        ),
    )
    op.create_index(op.f("ix_episode_run_id_state"), "episode", ["run_id", "state"])
    op.create_index(op.f("ix_episode_task_id"), "episode", ["task_id"])


def _create_episode_parts() -> None:
    op.create_table(
        "turn",
        sa.Column("episode_id", sa.String(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("weight_version", sa.Integer(), nullable=False),
        sa.Column("finish", sa.String(), nullable=False),
        sa.Column("sampled_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("loss_mask", sa.LargeBinary(), nullable=False),
        sa.Column("observation_ids", sa.LargeBinary(), nullable=False),
        sa.Column("experts", sa.LargeBinary(), nullable=True),
        sa.Column("experts_shape", sa.String(), nullable=True),
        sa.Column("experts_start", sa.Integer(), nullable=False),
        sa.Column("media_json", sa.Text(), nullable=False),
        _foreign("episode_id", "episode", "fk_turn_episode_id_episode"),
        sa.PrimaryKeyConstraint("episode_id", "index", name=op.f("pk_turn")),
    )
    op.create_table(
        "tool_call",
        sa.Column("episode_id", sa.String(), nullable=False),
        sa.Column("turn", sa.Integer(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("name_text", sa.Text(), nullable=False),
        sa.Column("arguments_text", sa.Text(), nullable=False),
        sa.Column("tool", sa.Text(), nullable=True),
        sa.Column("arguments_json", sa.Text(), nullable=True),
        sa.Column("observation", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("repairs_json", sa.Text(), nullable=False),
        sa.Column("elapsed_s", sa.Double(), nullable=False),
        _foreign("episode_id", "episode", "fk_tool_call_episode_id_episode"),
        sa.PrimaryKeyConstraint("episode_id", "turn", "index", name=op.f("pk_tool_call")),
    )
    op.create_table(
        "reward_part",
        sa.Column("episode_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        _foreign("episode_id", "episode", "fk_reward_part_episode_id_episode"),
        sa.PrimaryKeyConstraint("episode_id", "name", name=op.f("pk_reward_part")),
    )


def _create_leases() -> None:
    op.create_table(
        "lease",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("ref", sa.Text(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("data_json", sa.Text(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lease")),
        sa.UniqueConstraint("kind", "ref", name=op.f("uq_lease_kind_ref")),
    )
