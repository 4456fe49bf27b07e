"""PARLTorchLearner: RLlib's learner life around parl.learner.TokenLearner.

RLlib builds it, places it, finds it again and checkpoints it. Batches, losses, optimizers and
gradient steps are TokenLearner's: RLlib's own update loop counts rows and would cut sequences.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from torch import Tensor

from parl.config import RunConfig
from parl.learner.learner import TokenLearner
from parl.learner.optim.peers import Peers
from parl.rllib.module import PolicyModule
from parl.trajectory import TrainingSample


class PARLTorchLearner(TorchLearner):
    """One rank. Call its verbs through LearnerGroup.foreach_learner, on all ranks at once."""

    tokens: TokenLearner

    @property
    def _run(self) -> RunConfig:
        # not PARLConfig: its module names this one as the default
        return RunConfig.model_validate(self.config["run_config"])

    def build(self) -> None:
        if not self._is_built:
            torch.set_num_threads(self._run.ray.learner_threads)
        super().build()

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """TokenLearner owns its optimizers and rebuilds them, so RLlib is told of none."""
        module = self.module[module_id]
        assert isinstance(module, PolicyModule), f"{module_id} is a {type(module).__name__}"
        if not self.distributed:
            self.tokens = TokenLearner(module.policy, self._run.learner)
            return
        ranks = torch.distributed
        peers = Peers(ranks.get_rank(), ranks.get_world_size(), _gather_over_ranks)
        self.tokens = TokenLearner(
            module.policy, self._run.learner, _sum_over_ranks, _max_over_ranks, peers
        )

    def _make_modules_ddp_if_necessary(self) -> None:
        """No DDP wrapper: it normalises per rank and fails on experts that got no token. The
        gradients are summed in TokenLearner under one global token norm."""

    # -- verbs ----------------------------------------------------------------------------------

    def train_on(
        self, samples: Sequence[TrainingSample], advantages: Sequence[float]
    ) -> dict[str, float]:
        """One policy-gradient step on this rank's part of a round."""
        return self.tokens.update(samples, advantages)

    def sft_on(
        self, samples: Sequence[TrainingSample], muon_lr: float, adamw_lr: float
    ) -> dict[str, float]:
        """One cross-entropy step on this rank's part of a batch."""
        return self.tokens.sft_update(samples, muon_lr, adamw_lr)

    def reset_optimizers(self) -> None:
        self.tokens.reset_optimizers()

    def policy_weights(self) -> dict[str, np.ndarray]:
        """float32 tensors by name, equal on all ranks."""
        return self.tokens.weights()

    def export(self) -> dict[str, bytes]:
        """The files of TokenLearner.save by name: parameters, optimizers, rates, counters."""
        with tempfile.TemporaryDirectory(prefix="parl-learner-") as name:
            self.tokens.save(Path(name))
            return {path.name: path.read_bytes() for path in sorted(Path(name).iterdir())}

    def load(self, files: dict[str, bytes]) -> None:
        """Exact inverse of ``export``; CheckpointError when the files are of another model."""
        with tempfile.TemporaryDirectory(prefix="parl-learner-") as name:
            for file, data in files.items():
                (Path(name) / file).write_bytes(data)
            self.tokens.restore(Path(name))

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: Any, fwd_out: Any
    ) -> Any:
        """RLlib asks for it to exist; its own ``update`` is not a way to train this policy."""
        raise NotImplementedError(
            f"loss of {module_id} in LearnerGroup.update: it counts rows and cuts sequences; call "
            "train_on through LearnerGroup.foreach_learner"
        )

    # -- RLlib's checkpoint tree ----------------------------------------------------------------

    def _get_optimizer_state(self) -> dict[str, Any]:
        """As files: RLlib's numpy road rounds float64 and has no bfloat16."""
        return {DEFAULT_MODULE_ID: self.export()}

    def _set_optimizer_state(self, state: dict[str, Any]) -> None:
        self.load(state[DEFAULT_MODULE_ID])


def _sum_over_ranks(tensor: Tensor) -> Tensor:
    torch.distributed.all_reduce(tensor)
    return tensor


def _max_over_ranks(tensor: Tensor) -> Tensor:
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return tensor


def _gather_over_ranks(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(found, tensor)
    return found
