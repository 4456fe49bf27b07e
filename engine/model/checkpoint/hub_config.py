"""config.json of a hub folder <-> ModelConfig.

Types: kimi_k2 and deepseek_v3 (mla), kimi_k25 (its text_config), llama (dense gqa), and parl_k25
for what no other type describes: gqa with experts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.errors import CheckpointError
from engine.model.checkpoint.sizes import check_fields
from engine.model.config import ModelConfig

OWN_TYPE = "parl_k25"
K25_TYPE = "kimi_k25"
CHAT_FORMAT = "chat_format"
"""Our field of config.json: the type whose chat format the model speaks, where it is not its own.
"""
MLA_TYPES = ("kimi_k2", "deepseek_v3")
TYPES = (*MLA_TYPES, "llama", OWN_TYPE)
ARCHITECTURES = {
    "kimi_k2": "DeepseekV3ForCausalLM",  # what the released K2 configs say
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    OWN_TYPE: "PolicyForCausalLM",
}
_SHARED = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "hidden_act",
    "attention_bias",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "tie_word_embeddings",
    "max_position_embeddings",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
]
_MOE = [
    "first_k_dense_replace",
    "moe_layer_freq",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "scoring_func",
    "topk_method",
    "routed_scaling_factor",
    "norm_topk_prob",
    "seq_aux",
    "aux_loss_alpha",
    "num_nextn_predict_layers",
]
ATTENTION = "parl_attention"
"""Our own key of config.json: how a policy that was trained with hybrid attention reads."""
_HYBRID = ["mode", "hot", "profile", "hybrid"]
_MLA = ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]

_NEEDED = ["vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"]
_NEEDED += ["num_attention_heads", "rms_norm_eps", "max_position_embeddings"]
_NEEDED_MOE = ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"]
_NEEDED_MLA = ["first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor"]
_NEEDED_MLA += ["n_shared_experts", *(name for name in _MLA if name != "q_lora_rank")]


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it is; CheckpointError when it is missing or not JSON."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}; expected a hub folder with config.json and *.safetensors"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}; download it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}, expected a JSON object")
    return config


def text_config(config: Mapping[str, Any], where: str = "config.json") -> Mapping[str, Any]:
    """The part of a multimodal config that is about the text model; else the config itself."""
    inner = config.get("text_config") if "text_config" in config else config
    if not isinstance(inner, Mapping):
        raise CheckpointError(
            f"{where}: text_config is a {type(inner).__name__}, expected an object"
        )
    return inner


def kept(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a written config.json must still say though ModelConfig has no field for it: every end
    of text where there are several, and the chat format of K2.5, whose text part alone is a
    kimi_k2."""
    inner = text_config(config)
    extra: dict[str, Any] = {
        name: inner[name]
        for name in ("bos_token_id", "eos_token_id")
        if isinstance(inner.get(name), list)
    }
    chat = K25_TYPE if config.get("model_type") == K25_TYPE else config.get(CHAT_FORMAT)
    return extra if chat is None else {**extra, CHAT_FORMAT: chat}


def from_hub(config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """CheckpointError, naming the field, when the model is of a kind that we do not have."""
    inner = text_config(config, where)
    kind = inner.get("model_type")
    if kind not in TYPES:
        raise CheckpointError(
            f"{where}: model_type={kind!r} is not supported; expected one of {', '.join(TYPES)} or "
            "a text_config with one of these"
        )
    _check_needed(inner, kind, where)
    if inner.get("mlp_bias"):
        raise CheckpointError(
            f"{where}: mlp_bias=true is not supported; expected a model without biases"
        )
    fields = {name: inner[name] for name in _SHARED if inner.get(name) is not None}
    fields.setdefault("num_key_value_heads", inner.get("num_attention_heads"))
    fields.update(_rope(inner, where))
    if kind == "llama":
        fields["first_k_dense_replace"] = inner.get("num_hidden_layers")
    else:
        fields.update((name, inner[name]) for name in _MOE if inner.get(name) is not None)
    if kind in MLA_TYPES:
        fields.update((name, inner.get(name)) for name in _MLA if name in inner)
        fields.setdefault("rope_interleave", inner.get("rope_interleave", True))
        fields["attention"] = {"kind": "mla"}
    else:
        fields["attention"] = {}
        heads = inner["num_attention_heads"] or 1
        given = inner.get("head_dim")
        fields["head_dim"] = inner["hidden_size"] // heads if given is None else given
    hybrid = inner.get(ATTENTION, {})
    if not isinstance(hybrid, Mapping):
        raise CheckpointError(f"{where}: {ATTENTION}={hybrid!r}: expected an object")
    fields["attention"] |= hybrid
    return checked(fields, where)


def checked(fields: dict[str, Any], where: str) -> ModelConfig:
    """CheckpointError names ``where``, the field and its value."""
    check_fields(fields, where)
    # some models list several ends of text; the engine gets its stop ids from the chat template
    for name in ("bos_token_id", "eos_token_id"):
        if isinstance(fields.get(name), list):
            fields[name] = fields[name][0] if fields[name] else None
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = first["msg"].removeprefix("Value error, ")
        name = ".".join(map(str, first["loc"]))
        field = f"{name}={first['input']!r}: " if name else ""
        raise CheckpointError(f"{where}: {field}{reason}") from error


def _check_needed(config: Mapping[str, Any], kind: str, where: str) -> None:
    """No default stands in for a field that decides what the model computes: the types disagree
    about theirs, and a converted checkpoint would keep the wrong one."""
    names = [*_NEEDED, *(() if kind == "llama" else _NEEDED_MOE)]
    names += _NEEDED_MLA if kind in MLA_TYPES else ()
    for name in names:
        value = config.get(name)
        if value is None:
            raise CheckpointError(
                f"{where} has no {name}, which {kind} needs; download the file again"
            )
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or (isinstance(value, float) and not math.isfinite(value)):
            raise CheckpointError(f"{where}: {name}={value!r}: expected a number")


def _rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Old configs have rope_theta and rope_scaling, transformers 5 writes rope_parameters."""
    rope: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        given = config.get(name) or {}
        if not isinstance(given, Mapping):
            raise CheckpointError(f"{where}: {name}={given!r}: expected an object")
        rope.update(given)
    theta = rope.pop("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind != "yarn":
        raise CheckpointError(
            f"{where}: rope type {kind!r} is not supported; expected default or yarn"
        )
    if rope.get("attention_factor") is not None or rope.get("truncate") is False:
        raise CheckpointError(
            f"{where}: yarn with attention_factor or truncate=false is not supported; K2 and "
            "DeepSeek-V3 checkpoints have neither"
        )
    known = "factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim"
    yarn = {name: rope[name] for name in known.split() if rope.get(name) is not None}
    return {"rope_theta": theta, "rope_scaling": yarn}


def default_type(config: ModelConfig) -> str:
    """The type that others know this model by."""
    if config.is_mla:
        return "kimi_k2"
    return OWN_TYPE if config.num_moe_layers or config.rope_interleave else "llama"


def to_hub(config: ModelConfig, model_type: str | None = None) -> dict[str, Any]:
    """config.json of ``model_type``; CheckpointError when the model is not of that type."""
    kind = model_type or default_type(config)
    allowed = MLA_TYPES if config.is_mla else (default_type(config), OWN_TYPE)
    if kind not in allowed:
        raise CheckpointError(
            f"a model with attention.kind={config.attention.kind!r} and {config.num_moe_layers} "
            f"expert layers cannot be saved as {kind!r}; expected one of {', '.join(allowed)}"
        )
    values = config.model_dump(mode="json")
    names = [*_SHARED, *(() if kind == "llama" else _MOE), *(_MLA if config.is_mla else ())]
    hub: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **{name: values[name] for name in names},
        "rope_theta": config.rope_theta,
        "use_cache": True,
    }
    if not config.is_mla:
        hub["head_dim"] = config.head_dim
    if kind == "llama":
        hub["mlp_bias"] = False
    if config.is_mla:
        hub["rope_interleave"] = config.rope_interleave
    if config.attention.mode == "hybrid":
        # other software reads the weights with full attention, which they came from or near
        hub[ATTENTION] = {name: values["attention"][name] for name in _HYBRID}
    if config.rope_scaling is not None:
        hub["rope_scaling"] = {"type": "yarn", **values["rope_scaling"]}
    return hub
