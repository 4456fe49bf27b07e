"""PolicyModule: the learner's copy of the policy as RLlib knows it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.model.sequences import forward_sequences


class PolicyModule(TorchRLModule):
    """Wraps engine.model.PolicyModel. Generation is the engine's business; runners hold no copy."""

    policy: PolicyModel

    def setup(self) -> None:
        """``model_config``: {"model": ModelConfig fields, "seed": int}."""
        try:
            settings = ModelConfig.model_validate(self.model_config["model"])
            self.policy = PolicyModel(settings, int(self.model_config["seed"]))
        except AttributeError as error:
            # RLModuleSpec.build would report an unrelated deprecation instead
            raise RuntimeError(f"the policy cannot be built: {error}") from error

    def _forward(self, batch: Mapping[str, Any], **kwargs: Any) -> dict[str, Tensor]:
        """token_ids int64 [B, T] right-padded, lengths int64 [B] -> logits float32 [N, V] of the N
        real positions and rows int64 [N], their index into B*T."""
        hidden, _, rows = forward_sequences(self.policy, batch["token_ids"], batch["lengths"])
        return {"logits": self.policy.logits(hidden), "rows": rows}

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        inference_only: bool = False,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """CPU tensors in their own dtype: RLlib's numpy road has no bfloat16 and narrows int64.

        Empty for ``inference_only``, which RLlib would push to every runner.
        """
        if inference_only:
            return {}
        return {name: tensor.detach().cpu().clone() for name, tensor in self.state_dict().items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Exact inverse of ``get_state``."""
        self.load_state_dict({name: torch.as_tensor(value) for name, value in state.items()})
