"""What a round needs from the outside: someone who runs episodes and someone who learns.

Two implementations of each exist: in-process (parl.rounds.local) and over Ray (parl.rllib). Both
talk through the ledger: a collector writes finished episodes there and the learner's batch is read
back from there, so a fresh round and a resumed one take the same path.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from engine.runtime.types import WeightSet
from parl.rollout.jobs import GroupJob
from parl.trajectory import TrainingSample


class Collector(Protocol):
    """Runs groups of episodes with the engines' current weights."""

    def collect(self, groups: Sequence[GroupJob], deadline_s: float) -> None:
        """Return when every episode of ``groups`` is finished in the ledger.

        Lost workers are survived: what they held is issued again with the same draws. RoundError
        when ``deadline_s`` passes or an episode fails for good.
        """
        ...

    def publish(self, weights: WeightSet) -> None:
        """Make every engine serve ``weights`` before the next collect."""
        ...

    def close(self) -> None: ...


class LearnerPort(Protocol):
    """Owns parameters and optimizer state; pure function of what it is given."""

    def update(
        self, samples: Sequence[TrainingSample], advantages: Sequence[float]
    ) -> dict[str, float]:
        """One optimizer step on one round, an advantage a sample; metrics hold at least loss and
        grad_norm."""
        ...

    def sft_update(
        self, samples: Sequence[TrainingSample], muon_lr: float, adamw_lr: float
    ) -> dict[str, float]:
        """One cross-entropy step on the tokens whose loss_mask is 1."""
        ...

    def reset_optimizers(self) -> None:
        """Forget momentum and go back to the configured rates."""
        ...

    def weights(self) -> dict[str, np.ndarray]:
        """float32 tensors by name, router bias included."""
        ...

    def save(self, folder: Path) -> None:
        """Write a complete restorable state into an existing empty folder."""
        ...

    def restore(self, folder: Path) -> None:
        """Exactly undo everything since the matching ``save``. CheckpointError if it cannot."""
        ...
