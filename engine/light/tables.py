"""Which kind of context table an engine needs, and the cache under it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

import torch

from engine.config import EngineConfig
from engine.kernels.dispatch import runs_triton
from engine.kvcache.config import TierConfig
from engine.kvcache.layout import CacheLayout
from engine.kvcache.paged import PagedKV
from engine.kvcache.quantise import BLOCK
from engine.kvcache.tiered import TieredKV
from engine.kvcache.turns import TurnRouter
from engine.light.contexts import ContextTable
from engine.light.paged_contexts import PagedTable
from engine.light.tiered_contexts import TieredTable
from engine.model.config import ModelConfig
from infra.errors import ConfigError

TextOf = Callable[[Sequence[int]], str]
"""Token ids to text."""


def new_table(
    model: ModelConfig, config: EngineConfig, text_of: TextOf | None = None
) -> ContextTable:
    """ConfigError when the engine section does not fit the model's attention."""
    _check_options(model, config, text_of)
    if model.attention.mode == "hybrid":
        kv = _tiered(model, config)
        router = None
        if config.cold_router is not None:
            assert text_of is not None, "checked above"
            router = TurnRouter(config.cold_router, text_of)
        kernels = runs_triton(config.kernels, kv.device.full.keys[0])
        if kernels:
            from engine.kernels.serving import KernelCacheOps

            kv.device.use(KernelCacheOps())
        return TieredTable(model, config, kv, router, kernels)
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


def _check_options(model: ModelConfig, config: EngineConfig, text_of: TextOf | None) -> None:
    router, zone = config.cold_router, config.hot_zone
    for name, given in (("cold_router", router), ("hot_zone", zone)):
        if given is not None and model.attention.mode != "hybrid":
            raise ConfigError(
                f"engine.{name} is set, but model.attention.mode='{model.attention.mode}' has no "
                "tiers; set it to 'hybrid' or leave the section out"
            )
    if zone is not None and config.deterministic:
        raise ConfigError(
            f"engine.hot_zone.mode='{zone.mode}' with engine.deterministic=true: a zone that "
            "follows attention cannot be replayed by a learner; set deterministic=false or leave "
            "hot_zone out"
        )
    if zone is not None and not (
        BLOCK <= model.attention.hot <= zone.maximum and model.attention.hot % BLOCK == 0
    ):
        raise ConfigError(
            f"engine.hot_zone begins at model.attention.hot={model.attention.hot}; expected a "
            f"multiple of {BLOCK} up to hot_zone.maximum={zone.maximum}"
        )
    if router is None:
        return
    if config.tiers.cold == "off":
        raise ConfigError(
            "engine.cold_router is set, but engine.tiers.cold='off' sends nothing away; set it to "
            "host or disk"
        )
    if text_of is None:
        raise ConfigError(
            "engine.cold_router is set, but this engine was started without text_of, a callable "
            "from token ids to text; pass a tokenizer's decode, or a vocabulary"
        )
    if config.deterministic and router.policy != "wait_complete":
        raise ConfigError(
            f"engine.cold_router.policy='{router.policy}' with engine.deterministic=true: when "
            "blocks arrive would depend on a thread; set it to wait_complete"
        )


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
