"""Our model behind transformers' Auto classes: ``register_modules()``, then AutoConfig and
AutoModelForCausalLM read a folder that ``save_model`` wrote, generate, and write it back.

Registered types: kimi_k2, so that released K2 folders load without remote code, and parl_k25. Types
that transformers has itself (deepseek_v3, llama) keep its own classes.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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

from engine.errors import CheckpointError, EngineError, NotSupportedError
from engine.model.checkpoint.hub_config import OWN_TYPE, from_hub, kept, read_config, text_config
from engine.model.checkpoint.load import DTYPES, load_tensors, open_checkpoint
from engine.model.checkpoint.save import MAX_SHARD_BYTES, save_model
from engine.model.dense import forward_dense
from engine.model.model import PolicyModel

_FROM_AUTO = {"adapter_kwargs", "_from_auto", "trust_remote_code", "_commit_hash"}
"""What AutoModel passes along that says nothing about the model."""
_ALWAYS = {"low_cpu_mem_usage": (True, False), "local_files_only": (True, False)}
_ALWAYS |= {"use_safetensors": (True,), "safe_serialization": (True,), "is_main_process": (True,)}
"""Options that ask for what is done anyway, with the values that do."""
_INSTEAD = {
    "load_in_4bit": "quantised checkpoints are dequantised when they are read",
    "load_in_8bit": "quantised checkpoints are dequantised when they are read",
    "quantization_config": "config.json alone says how the tensors are quantised",
    "attn_implementation": "attention is torch's scaled_dot_product_attention",
    "state_dict": "give tensors to model.policy.load_state_dict",
    "push_to_hub": "upload the folder afterwards",
    "revision": "give the folder of that revision",
    "subfolder": "give that folder itself",
    "cache_dir": "give a folder of this machine",
    "safe_serialization": "tensors are written as safetensors only",
    "use_safetensors": "tensors are read from safetensors only",
    "is_main_process": "call it in the process that writes",
}
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_CACHE = next(
    field.name
    for field in dataclasses.fields(CausalLMOutputWithPast)
    if field.name in ("cache", "past_key_values")
)
"""transformers renamed past_key_values to cache between 5.16 and 5.24, in arguments and outputs."""


class KimiK2Config(PreTrainedConfig):
    """config.json as it is; ``from_hub`` checks it."""

    # declared, because transformers reads them while it puts YaRN into rope_parameters; None stays
    # None, so that from_hub can say what config.json lacks
    max_position_embeddings: int | None = None
    rope_parameters: dict[str, Any] | None = None
    model_type = "kimi_k2"
    keys_to_ignore_at_inference = ("cache", "past_key_values")


class ParlConfig(KimiK2Config):
    model_type = OWN_TYPE


_CONFIGS: dict[str, type[KimiK2Config]] = {"kimi_k2": KimiK2Config, OWN_TYPE: ParlConfig}


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
        """Our own loader, with its checks and its bounded memory. A local folder only.

        ``config``, or fields of it given to AutoModelForCausalLM, stand before config.json.
        ``dtype`` (``torch_dtype`` too): bfloat16, float32, "auto"; None is float32. An option that
        cannot be kept is a CheckpointError.
        """
        folder = Path(pretrained_model_name_or_path)
        if dtype is None:
            dtype = options.pop("torch_dtype", None)
        else:
            options.pop("torch_dtype", None)
        for name, value in options.items():
            if name not in _FROM_AUTO and value is not None:
                _check_option("from_pretrained", name, value, "config, dtype and device_map")
        own, source = open_checkpoint(folder)
        if config is None:
            inner = text_config(read_config(folder))
            own_class = _CONFIGS.get(inner["model_type"])
            config = own_class(**inner) if own_class else AutoConfig.for_model(**inner)
            assert isinstance(config, PreTrainedConfig), "every type that we read has a class"
        else:
            own = from_hub(config.to_dict(), f"{folder} with the given config")
        policy = load_tensors(own, source, dtype=_dtype(dtype, config), device_map=device_map)
        model = cls(config, policy)
        model.generation_config = _generation(folder, config)
        return model.eval()

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | Path,
        *,
        model_type: str | None = None,
        max_shard_size: int | str = MAX_SHARD_BYTES,
        **options: Any,
    ) -> None:
        """A folder that from_pretrained reads. ``model_type``: what config.json calls the model, by
        default what it was called; deepseek_v3 is what transformers reads with its own class.
        ``max_shard_size`` in bytes or as "5GB"."""
        for name, value in options.items():
            if value is not None and not (name == "push_to_hub" and value is False):
                expected = "the folder, model_type and max_shard_size"
                _check_option("save_pretrained", name, value, expected)
        save_model(
            self.policy,
            Path(save_directory),
            model_type=model_type or self.config.model_type,
            max_shard_bytes=_bytes(max_shard_size),
            extra=kept(self.config.to_dict()),
            beside=self._save_generation,
        )

    def _save_generation(self, folder: Path) -> None:
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)

    def get_input_embeddings(self) -> nn.Module:
        """A view: its weight is the policy's parameter itself."""
        rows, width = self.policy.embed_tokens.shape
        view = nn.Embedding(rows, width, device="meta")
        view.weight = self.policy.embed_tokens
        return view

    def get_output_embeddings(self) -> nn.Module:
        head = self.policy.embed_tokens if self.policy.lm_head is None else self.policy.lm_head
        view = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
        view.weight = head
        return view

    def set_input_embeddings(self, value: nn.Module) -> NoReturn:
        raise NotSupportedError(
            "the vocabulary of a policy is fixed: its config, head and embedding belong together"
        )

    def set_output_embeddings(self, new_embeddings: nn.Module) -> NoReturn:
        self.set_input_embeddings(new_embeddings)

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
        _check_ids(input_ids, self.policy.config.vocab_size)
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


def _check_option(call: str, name: str, value: Any, expected: str) -> None:
    """CheckpointError unless the option asks for what is done anyway."""
    if name in _ALWAYS and value in _ALWAYS[name]:
        return
    hint = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise CheckpointError(f"{call} got {name}={value!r}; expected only {expected}{hint}")


def _check_ids(ids: Tensor, vocabulary: int) -> None:
    """A device would fail later, with an index error that names nothing."""
    if ids.is_meta or not ids.numel():
        return
    low, high = (int(end) for end in ids.aminmax())
    if low < 0 or high >= vocabulary:
        raise EngineError(
            f"input_ids holds {low if low < 0 else high}, the model knows 0 to {vocabulary - 1}; "
            "take the tokenizer of this model"
        )


def _generation(folder: Path, config: PreTrainedConfig) -> GenerationConfig:
    """generation_config.json where there is one: it may list more ends of text."""
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(config)


def _bytes(size: int | str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size).strip())
    unit = _UNITS.get((found[2] or "B").upper()) if found else None
    if found is None or unit is None or float(found[1]) <= 0:
        raise CheckpointError(f"max_shard_size={size!r}, expected bytes or a text such as 5GB")
    return int(float(found[1]) * unit)


def register_modules() -> None:
    """Idempotent; a kimi_k2 of transformers itself would be replaced by ours."""
    for config, model in ((KimiK2Config, PolicyForCausalLM), (ParlConfig, ParlForCausalLM)):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)
