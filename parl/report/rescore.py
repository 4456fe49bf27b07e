"""``parl rl rescore``: every reward once more from the ledger's episodes, compared bit for bit."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import select

from infra.db.engine import Ledger
from infra.db.models import EpisodeRow, RewardPartRow
from parl.store.store import Store
from reward_models.config import RewardConfig
from reward_models.stages import RewardModel


@dataclass(frozen=True, slots=True)
class Rescored:
    """``differences``: one line an episode whose reward or parts would be others today."""

    num_rounds: int
    num_episodes: int
    differences: tuple[str, ...]


Stored = dict[str, tuple[float | None, dict[str, float]]]
"""Episode id -> (reward, parts)."""


def rescore(ledger: Ledger, run_id: str, config: RewardConfig) -> Rescored:
    """Fold the reward state over all committed training rounds and score each with the state it
    was trained with. Nothing is written."""
    store = Store(ledger, run_id)
    model = RewardModel(config)
    state = model.initial_state()
    committed = [row for row in store.committed_rounds() if row.phase == "train"]
    differences: list[str] = []
    count = 0
    for row in committed:
        stored = _stored(ledger, run_id, row.index)
        episodes = [t.to_episode() for t in store.load_trajectories("train", row.index)]
        scored = model.score_all(episodes, state)
        for episode, now in zip(episodes, scored, strict=True):
            found = stored[episode.episode_id]
            if (now.total, now.parts) != found:
                differences.append(
                    f"{episode.episode_id}: ledger {found[0]} {found[1]}, now {now.total} "
                    f"{now.parts}"
                )
        count += len(episodes)
        state, _ = model.fold(state, episodes)
    return Rescored(len(committed), count, tuple(differences))


def _stored(ledger: Ledger, run_id: str, index: int) -> Stored:
    where = (
        EpisodeRow.run_id == run_id,
        EpisodeRow.phase == "train",
        EpisodeRow.round_index == index,
    )
    with ledger.session() as session:
        rewards = session.execute(select(EpisodeRow.id, EpisodeRow.reward).where(*where)).all()
        parts: dict[str, dict[str, float]] = defaultdict(dict)
        rows = select(RewardPartRow).join(EpisodeRow, RewardPartRow.episode_id == EpisodeRow.id)
        for part in session.scalars(rows.where(*where)):
            parts[part.episode_id][part.name] = part.value
    return {episode_id: (reward, parts[episode_id]) for episode_id, reward in rewards}
