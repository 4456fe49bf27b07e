"""A synthetic finished run in a real ledger: success rises, tokens fall, gates open at round 20."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np

from infra.db.engine import Ledger, open_ledger
from infra.db.models import (
    EpisodeRow,
    RewardPartRow,
    RoundRow,
    RunRow,
    TaskTypeStatsRow,
    ToolCallRow,
    TurnRow,
)

RUN_ID = "demo-001"
EPISODE_ID = f"{RUN_ID}/train/00000/00000/000"
CONFIG = {"rounds": {"num_rounds": 40, "eval_episodes": 20}, "run": {"seed": 3}}


def make_run(folder: Path, num_rounds: int = 40, per_type: int = 16) -> Ledger:
    """Rows as the machine leaves them; the draw is seeded, so numbers are the same every time."""
    ledger = open_ledger(f"sqlite:///{folder}/ledger.db")
    draw = random.Random(1)
    with ledger.transaction() as session:
        session.add(
            RunRow(
                id=RUN_ID,
                name="demo",
                kind="rl",
                status="finished",
                seed=3,
                config_json=CONFIG,
                config_hash="c0ffee",
                code_commit="0123456789abcdef",
                run_dir=str(folder),
            )
        )
        _phase(session, draw, "eval:before", 0, 0.0, per_type, 90.0)
        for index in range(num_rounds):
            done = index / max(num_rounds - 1, 1)
            _phase(session, draw, "train", index, done, per_type, 100.0 + 2 * index)
        _phase(session, draw, "eval:after", 0, 1.0, per_type, 200.0)
        _tokens(session)
    return ledger


def _tokens(session) -> None:
    """Two turns, a call and the reward parts of the first training episode."""
    episode = session.get(EpisodeRow, EPISODE_ID)
    episode.prompt_ids = np.array([1, 2, 3], "<i4").tobytes()
    episode.draw_json = {"seed": 3, "round": 0, "task": 0, "sample": 0, "stream": 0}
    episode.reward_reasons_json = ["correct", "gate closed: budget not enforced"]
    episode.final_text = "5"
    turns = [([65, 7], [-0.25, -1.5], [1, 1], [10, 11]), ([53, 7], [-0.125, -0.5], [1, 0], [])]
    for index, (sampled, logprobs, mask, observed) in enumerate(turns):
        session.add(
            TurnRow(
                episode_id=EPISODE_ID,
                index=index,
                weight_version=0,
                finish="stop",
                sampled_ids=np.array(sampled, "<i4").tobytes(),
                logprobs=np.array(logprobs, "<f4").tobytes(),
                loss_mask=np.array(mask, "u1").tobytes(),
                observation_ids=np.array(observed, "<i4").tobytes(),
            )
        )
    session.add(
        ToolCallRow(
            episode_id=EPISODE_ID,
            turn=0,
            index=0,
            name_text="functions.lookup:0",
            arguments_text='{"key":"a"}',
            tool="lookup",
            arguments_json={"key": "a"},
            observation="5",
            repairs_json=["trailing comma"],
            elapsed_s=0.0012,
        )
    )
    session.add(RewardPartRow(episode_id=EPISODE_ID, name="correctness", value=1.0))


def _phase(session, draw, phase, index, done, per_type, start):
    is_open = done > 0.5
    session.add(
        RoundRow(
            run_id=RUN_ID,
            phase=phase,
            index=index,
            status="committed",
            stage=1 if done > 0.7 else 0,
            weight_version_in=index,
            weight_version_out=index + 1 if phase == "train" else index,
            checkpoint_path=f"checkpoints/{phase}-{index}" if index % 5 == 0 else None,
            metrics_json={
                "loss": 0.1,
                "grad_norm": 1.5,
                "max_abs_dlogp": 3e-6 * (1 + draw.random()),
                "mean_abs_dlogp": 2e-7,
                "expert_flip_share": 0.0002,
            },
            started_at=start,
            finished_at=start + 1.5,
        )
    )
    for task, (task_type, low) in enumerate((("lookup", 0.55), ("add", 0.2))):
        chance = low + (0.96 - low) * (1 - math.exp(-4 * done))
        tokens = 20 + 16 * math.exp(-3 * done) + 10 * task
        rows = []
        for sample in range(per_type):
            correct = float(draw.random() < chance)
            length = max(8, round(draw.gauss(tokens, 4)))
            rows.append((correct, length))
            session.add(_episode(phase, index, task, sample, task_type, correct, length))
        if phase == "train":
            session.add(
                TaskTypeStatsRow(
                    run_id=RUN_ID,
                    round_index=index,
                    task_type=task_type,
                    num_episodes=per_type,
                    num_scored=per_type,
                    num_correct=int(sum(c for c, _ in rows)),
                    gate_open=is_open if task_type == "add" else done > 0.25,
                )
            )


def _episode(phase, index, task, sample, task_type, correct, length):
    return EpisodeRow(
        id=f"{RUN_ID}/{phase}/{index:05d}/{task:05d}/{sample:03d}",
        run_id=RUN_ID,
        phase=phase,
        round_index=index,
        task_index=task,
        sample=sample,
        task_name=f"lookup_calc/{task_type}",
        task_type=task_type,
        state="trained",
        outcome="completed",
        correctness=correct,
        reward=correct,
        num_tokens=length,
        weight_version=index,
    )
