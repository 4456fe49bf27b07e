"""Which kind of context table an engine needs, and the cache under it."""

from __future__ import annotations

import uuid

import torch

from engine.config import EngineConfig
from engine.kvcache.config import TierConfig
from engine.kvcache.layout import CacheLayout
from engine.kvcache.paged import PagedKV
from engine.kvcache.quantise import BLOCK
from engine.kvcache.tiered import TieredKV
from engine.light.contexts import ContextTable
from engine.light.paged_contexts import PagedTable
from engine.light.tiered_contexts import TieredTable
from engine.model.config import ModelConfig
from infra.errors import ConfigError


def new_table(model: ModelConfig, config: EngineConfig) -> ContextTable:
    """ConfigError when the engine section does not fit hybrid attention."""
    if model.attention.mode == "hybrid":
        return TieredTable(model, config, _tiered(model, config))
    kv = PagedKV(
        model.num_hidden_layers,
        config.num_blocks,
        config.block_size,
        model.cached_heads,
        model.cached_key_dim,
        model.cached_value_dim,
        getattr(torch, config.kv_dtype),
    )
    return PagedTable(model, config, kv)


def _tiered(model: ModelConfig, config: EngineConfig) -> TieredKV:
    if config.block_size != BLOCK:
        raise ConfigError(
            f"engine.block_size={config.block_size}, but attention.mode='hybrid' keeps KV in "
            f"blocks of {BLOCK} tokens; set it to {BLOCK}"
        )
    layout = CacheLayout.of(model, model.attention.profile)
    return TieredKV(
        layout,
        tier_config(model, config),
        num_full=config.num_blocks,
        # profile full has no codes, so nothing ever lies in the other pool
        num_warm=config.num_warm_blocks if layout.profile != "full" else 0,
        # a cold record outlives neither its engine nor a change of weights
        model_id=uuid.uuid4().hex,
    )


def tier_config(model: ModelConfig, config: EngineConfig) -> TierConfig:
    """Capacities from the engine section, what belongs to the policy from the model section.
    ConfigError when the engine section says otherwise."""
    said = config.tiers
    policy = {
        "hot": model.attention.hot,
        "profile": model.attention.profile,
        "deterministic": config.deterministic,
    }
    for name, value in policy.items():
        given = getattr(said, name)
        if given not in (value, TierConfig.model_fields[name].default):
            source = "engine.deterministic" if name == "deterministic" else f"attention.{name}"
            raise ConfigError(
                f"engine.tiers.{name}={given}, but {source}={value} decides it; leave it out of "
                "the tiers section"
            )
    return said.model_copy(update=policy)
