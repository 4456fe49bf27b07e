"""LearnerGroupPort: RLlib's LearnerGroup, local or remote, as the rounds see a learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError
from ray.rllib.core.learner.learner_group import LearnerGroup

from infra.errors import ParlError
from parl.errors import CheckpointError, RunError
from parl.learner.batching import shards
from parl.rllib.learner import PARLTorchLearner
from parl.trajectory import TrainingSample

T = TypeVar("T")
RLLIB_TREE = "rllib"


class LearnerGroupPort:
    """LearnerPort over 0 (in process), 1 or more learners.

    With several, each gets a part of the samples that is balanced by tokens; loss and gradients are
    normalised by the tokens of the whole batch, so their number does not change the update.
    """

    def __init__(self, group: LearnerGroup, save_tree: Callable[[Path], Any]) -> None:
        """``save_tree(folder)`` writes RLlib's own checkpoint of everything else."""
        self._group = group
        self._save_tree = save_tree
        self._num_ranks = max(1, len(group))

    def update(
        self, samples: Sequence[TrainingSample], advantages: Sequence[float]
    ) -> dict[str, float]:
        if self._group.is_local:
            return self._first(lambda learner: learner.train_on(samples, advantages))
        parts = shards(samples, self._num_ranks)
        refs = [
            ray.put(([samples[i] for i in part], [advantages[i] for i in part])) for part in parts
        ]
        results = self._all(_train_part, refs=refs)
        kept = [
            sum(int(samples[i].loss_mask.sum()) for i in part if advantages[i] != 0)
            for part in parts
        ]
        return merge_metrics(results, kept)

    def sft_update(
        self, samples: Sequence[TrainingSample], muon_lr: float, adamw_lr: float
    ) -> dict[str, float]:
        if self._group.is_local:
            return self._first(lambda learner: learner.sft_on(samples, muon_lr, adamw_lr))
        parts = shards(samples, self._num_ranks)
        refs = [ray.put([samples[i] for i in part]) for part in parts]
        results = self._all(_sft_part, refs=refs, muon_lr=muon_lr, adamw_lr=adamw_lr)
        return merge_metrics(results, [1] * len(results))

    def reset_optimizers(self) -> None:
        self._all(lambda learner: learner.reset_optimizers())

    def weights(self) -> dict[str, np.ndarray]:
        return self._first(lambda learner: learner.policy_weights())

    def save(self, folder: Path) -> None:
        """TokenLearner's files in ``folder`` and RLlib's tree in ``folder``/rllib."""
        for name, data in self._first(lambda learner: learner.export()).items():
            (folder / name).write_bytes(data)
        self._save_tree(folder / RLLIB_TREE)

    def restore(self, folder: Path) -> None:
        """From TokenLearner's files alone: no pickle is read and every rank gets the same bits."""
        try:
            files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {folder} cannot be read: {error.strerror}; restore the folder from a "
                "copy"
            ) from error
        self._all(lambda learner, files: learner.load(files), files=files)

    def _first(self, func: Callable[[PARLTorchLearner], T]) -> T:
        return self._results(self._group.foreach_learner(func, remote_actor_ids=[0]))[0]  # pyright: ignore[reportArgumentType] - RLlib's type asks for a second parameter

    def _all(self, func: Callable[..., T], **kwargs: Any) -> list[T]:
        results = self._results(self._group.foreach_learner(func, **kwargs))
        if len(results) != self._num_ranks:
            raise RunError(
                f"{len(results)} of {self._num_ranks} learners answered; the others died: `parl rl "
                "resume` starts them from the last checkpoint"
            )
        return results

    def _results(self, results: Any) -> list[Any]:
        found = []
        for result in results:
            value = result.get()
            if not result.ok:
                raise _as_parl_error(value) from value
            found.append(value)
        return found


def _as_parl_error(error: Exception) -> ParlError:
    """What a learner raised, if it is ours; else one line that says which kind of failure."""
    if isinstance(error, ParlError):
        return error
    if isinstance(error, RayTaskError) and isinstance(error.cause, ParlError):
        return error.cause
    line = next(iter(str(error).strip().splitlines()), "")
    kind = "died" if isinstance(error, RayError) else "failed"
    return RunError(
        f"a learner {kind}: {type(error).__name__}: {line}; `parl rl resume` goes on from the last "
        "checkpoint"
    )


def merge_metrics(ranks: Sequence[dict[str, float]], tokens: Sequence[int]) -> dict[str, float]:
    """One step's metrics from those of its ranks.

    loss and num_sequences add up (each rank's loss is divided by the tokens of all); names with
    max or peak take the largest; what is global already is equal everywhere; means are weighted by
    ``tokens``, the trained tokens of each rank.
    """
    total = max(1, sum(tokens))
    merged: dict[str, float] = {}
    for name in ranks[0]:
        values = [rank[name] for rank in ranks]
        if name in ("loss", "num_sequences", "likely_share"):
            merged[name] = sum(values)
        elif name.startswith(("max_", "peak_")) or name in ("grad_norm", "num_tokens"):
            merged[name] = max(values)
        else:
            merged[name] = sum(v * n for v, n in zip(values, tokens, strict=True)) / total
    return merged


def _train_part(learner: PARLTorchLearner, refs: list[ray.ObjectRef]) -> dict[str, float]:
    samples, advantages = ray.get(refs[learner._learner_index])
    return learner.train_on(samples, advantages)


def _sft_part(
    learner: PARLTorchLearner, refs: list[ray.ObjectRef], muon_lr: float, adamw_lr: float
) -> dict[str, float]:
    return learner.sft_on(ray.get(refs[learner._learner_index]), muon_lr, adamw_lr)
