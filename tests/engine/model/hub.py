"""Tiny models of transformers with random tensors, and ours read from what they save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from engine.model.checkpoint.hub_config import from_hub
from engine.model.checkpoint.save import save_model
from tests.engine.tiny import make_model

YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MLA: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 24,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 0,
    "rope_parameters": YARN,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def deepseek(seed: int = 0, **changes: Any) -> DeepseekV3ForCausalLM:
    """Logits of absolute maximum about 4; the selection bias is random too."""
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**(MLA | changes)))
    return _randomised(model, seed)


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    fields: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "attn_implementation": "eager",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return _randomised(LlamaForCausalLM(LlamaConfig(**(fields | changes))), seed)


def _randomised(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.2 * noise)
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.3 * noise)
            else:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
    return model.eval()


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


RELEASED: dict[str, Any] = {
    # text_config of the released K2.5 (facts/kimi-facts.md 1.1) with its older spelling of rope and
    # what older transformers wrote into every config; only the sizes are ours
    "_name_or_path": "",
    "add_cross_attention": False,
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bad_words_ids": None,
    "bos_token_id": 1,
    "chunk_size_feed_forward": 0,
    "do_sample": False,
    "dtype": "bfloat16",
    "eos_token_id": 82,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 48,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "kv_lora_rank": 12,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "length_penalty": 1.0,
    "max_length": 20,
    "max_position_embeddings": 4096,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 5,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_beams": 1,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "output_attentions": False,
    "output_hidden_states": False,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "return_dict": True,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 64.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 1.3,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "temperature": 1.0,
    "tie_word_embeddings": False,
    "top_k": 50,
    "top_p": 1.0,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "4.56.2",
    "use_cache": True,
    "v_head_dim": 8,
    "vocab_size": 83,
}


def released_folder(folder: Path, **changes: Any) -> Path:
    """kimi_k2 with random tensors under the released config."""
    config = from_hub(RELEASED)
    save_model(make_model(config), folder)
    (folder / "config.json").write_text(json.dumps(RELEASED | changes))
    return folder


def k25_folder(folder: Path) -> Path:
    """kimi_k25: text under a prefix and a text_config, a tensor of the vision tower."""
    released_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors")
    outer = {"model_type": "kimi_k25", "bos_token_id": 1, "eos_token_id": 82}
    (folder / "config.json").write_text(json.dumps({**outer, "text_config": RELEASED}))
    return folder
