"""Our model behind transformers' Auto classes: ``register_modules()``, then AutoConfig and
AutoModelForCausalLM read a folder that ``save_model`` wrote, generate, and write it back.

Registered types: kimi_k2, so that released K2 folders load without remote code, and parl_k25. Types
that transformers has itself (deepseek_v3, llama) keep its own classes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from engine.errors import CheckpointError, NotSupportedError
from engine.model.checkpoint.hub_config import OWN_TYPE, from_hub
from engine.model.checkpoint.load import DTYPES, load_model
from engine.model.checkpoint.save import save_model
from engine.model.dense import forward_dense
from engine.model.model import PolicyModel

_FROM_AUTO = {"adapter_kwargs", "_from_auto", "trust_remote_code", "_commit_hash"}
"""What AutoModel passes along that says nothing about the model."""
_CACHE = next(
    field.name
    for field in dataclasses.fields(CausalLMOutputWithPast)
    if field.name in ("cache", "past_key_values")
)
"""transformers renamed past_key_values to cache between 5.16 and 5.24, in arguments and outputs."""


class KimiK2Config(PreTrainedConfig):
    """config.json as it is; ``from_hub`` checks it."""

    model_type = "kimi_k2"
    keys_to_ignore_at_inference = ("cache", "past_key_values")


class ParlConfig(KimiK2Config):
    model_type = OWN_TYPE


class PolicyForCausalLM(PreTrainedModel, GenerationMixin):
    """``policy`` with the forward, generate and save_pretrained of transformers."""

    config_class = KimiK2Config
    base_model_prefix = "policy"
    main_input_name = "input_ids"

    def __init__(self, config: PreTrainedConfig, policy: PolicyModel | None = None) -> None:
        super().__init__(config)
        # post_init is not called: it would draw new weights for the policy's tensors
        self.policy = policy or PolicyModel(from_hub(config.to_dict()))

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        config: PreTrainedConfig | None = None,
        dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        **options: Any,
    ) -> PolicyForCausalLM:
        """Our own loader, with its checks and its bounded memory. A local folder only."""
        folder = Path(pretrained_model_name_or_path)
        unknown = sorted(n for n, v in options.items() if n not in _FROM_AUTO and v is not None)
        if unknown:
            raise CheckpointError(
                f"from_pretrained got {unknown[0]}={options[unknown[0]]!r}; expected only config, "
                "dtype and device_map"
            )
        config = config or AutoConfig.from_pretrained(folder)
        kind = _dtype(dtype, config)
        policy = load_model(folder, dtype=kind, device_map=device_map)
        model = cls(config, policy)
        model.generation_config = GenerationConfig.from_model_config(config)
        return model.eval()

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, **options: Any
    ) -> None:
        if options:
            raise CheckpointError(
                f"save_pretrained got {sorted(options)}; expected the folder alone"
            )
        save_model(self.policy, Path(save_directory), model_type=self.config.model_type)

    @property
    def device(self) -> torch.device:
        return self.policy.embed_tokens.device

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        past_key_values: Any = None,
        return_dict: bool = True,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """input_ids int64 [B, T], attention_mask [B, S] of zeros and ones -> fp32 logits.

        labels int64 [B, T], -100 where not trained, give the mean cross-entropy of the next token.
        """
        asked = sorted(name for name, value in others.items() if value)
        if asked or not return_dict:
            raise NotSupportedError(
                f"forward got {asked or ['return_dict=False']}; this model reports logits and the "
                "cache only"
            )
        if attention_mask is not None and attention_mask.ndim != 2:
            raise NotSupportedError(
                f"attention_mask has {attention_mask.ndim} dimensions, expected 2: [batch, tokens]"
            )
        store: Any = past_key_values if cache is None else cache
        if use_cache and store is None:
            store = DynamicCache()
        past = 0 if store is None else store.get_seq_length()
        if attention_mask is None:
            shape = (len(input_ids), past + input_ids.shape[1])
            attention_mask = torch.ones(shape, dtype=torch.long, device=input_ids.device)

        def extend(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            assert store is not None, "passed on only where there is a cache"
            return store.update(k, v, layer)

        cached = store is not None
        hidden, _ = forward_dense(
            self.policy,
            input_ids,
            attention_mask[:, : past + input_ids.shape[1]].bool(),
            extend if cached else None,
            positions=position_ids,
            absorbed=cached,
        )
        kept = hidden[:, -logits_to_keep:] if logits_to_keep and labels is None else hidden
        logits = self.policy.logits(kept)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        result: dict[str, Any] = {"loss": loss, "logits": logits, _CACHE: store}
        return CausalLMOutputWithPast(**result)


class ParlForCausalLM(PolicyForCausalLM):
    """The same for folders of our own type."""

    config_class = ParlConfig


def _dtype(given: torch.dtype | str | None, config: PreTrainedConfig) -> torch.dtype:
    """``None`` is fp32; "auto" is what config.json says."""
    if given == "auto":
        given = config.dtype
    if isinstance(given, str):
        found = getattr(torch, given, None)
        if not isinstance(found, torch.dtype):
            raise CheckpointError(f"dtype={given!r}, expected auto, {' or '.join(DTYPES)}")
        return found
    return given or torch.float32


def register_modules() -> None:
    """Idempotent; a kimi_k2 of transformers itself would be replaced by ours."""
    for config, model in ((KimiK2Config, PolicyForCausalLM), (ParlConfig, ParlForCausalLM)):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)
