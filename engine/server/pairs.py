"""Settings of a server that are fine alone and wrong together: asked before anything is served.

What the engine's own sections check is not repeated here: window and hot, candidates and topk,
blocks and hybrid attention (engine.light.tables), summary adapters and heads (engine.model.
summaries), the router's encoder and its dimension (engine.kvcache.router), tokenizer and vocabulary
(loading). tests/engine/server/test_pairs.py has one test a pair, theirs included.
"""

from __future__ import annotations

from engine.config import EngineConfig
from engine.kvcache.config import BLOCK, TierConfig
from engine.kvcache.layout import CacheLayout
from engine.model.config import ModelConfig
from engine.server.config import ServeConfig, UserSection
from infra.errors import ConfigError


def check_pairs(
    config: ServeConfig,
    shape: ModelConfig,
    engine: EngineConfig,
    layout: CacheLayout,
    tiers: TierConfig,
) -> None:
    """ConfigError in one line. ``engine``: with the context the model can have."""
    _context_fits(shape, engine, tiers)
    _rows_fit(config, engine)
    users = {"user": config.user, **{f"users.{n}": u for n, u in config.users.items()}}
    for name, user in users.items():
        _user_is_served(name, user, shape, engine)
    _alarms_can_ring(config, shape, engine, layout)


def _context_fits(shape: ModelConfig, engine: EngineConfig, tiers: TierConfig) -> None:
    """The longest context must fit alone, or its requests would fail one by one."""
    if shape.attention.mode != "hybrid":
        room = engine.num_blocks * engine.block_size
        if room < engine.max_context:
            raise ConfigError(
                f"engine.num_blocks={engine.num_blocks} hold {room} tokens, less than one context "
                f"of {engine.max_context} (engine.max_context): raise num_blocks or lower it"
            )
        return
    blocks = -(-engine.max_context // BLOCK)
    # the sink, the zone, and the block that is being written
    hot = blocks if tiers.profile == "full" else min(blocks, -(-tiers.hot // BLOCK) + 2)
    if hot > engine.num_blocks:
        raise ConfigError(
            f"attention.hot={tiers.hot} takes {hot} blocks in full precision, engine.num_blocks="
            f"{engine.num_blocks}: raise num_blocks or lower hot"
        )
    kept = engine.max_context if tiers.cold == "off" else tiers.warm
    warm = max(0, min(blocks - hot, kept // BLOCK))
    if warm > engine.num_warm_blocks:
        raise ConfigError(
            f"one context keeps up to {warm} warm blocks (tiers.warm={tiers.warm}, cold="
            f"{tiers.cold!r}), engine.num_warm_blocks={engine.num_warm_blocks}: raise it, or lower "
            "tiers.warm with a cold tier"
        )


def _rows_fit(config: ServeConfig, engine: EngineConfig) -> None:
    router = config.router
    most = router.max_running
    if router.growth > 1:
        most = int(most * router.growth_limit)
    if most > engine.max_rows:
        raise ConfigError(
            f"router.max_running lets {most} requests decode at once, engine.max_rows="
            f"{engine.max_rows} computes fewer: raise max_rows or lower max_running"
        )


def _user_is_served(name: str, user: UserSection, shape: ModelConfig, engine: EngineConfig) -> None:
    mode = shape.attention.mode
    served = "tiered" if mode == "hybrid" else "full"
    if user.kv not in ("auto", served):
        raise ConfigError(
            f"{name}.kv={user.kv!r}, but the model runs attention.mode={mode!r}, which serves "
            f"kv={served!r}: every request would be refused; set it to 'auto'"
        )
    router = engine.cold_router
    if user.summaries and (mode != "hybrid" or router is None or router.encoder == "none"):
        raise ConfigError(
            f"{name}.summaries=true, but nothing makes summaries of cold blocks here: set "
            "model.attention.mode='hybrid' and engine.cold_router with an encoder, or leave it out"
        )


def _alarms_can_ring(
    config: ServeConfig, shape: ModelConfig, engine: EngineConfig, layout: CacheLayout
) -> None:
    hot = engine.num_blocks * layout.full_block_bytes
    if shape.attention.mode != "hybrid":
        hot = hot * engine.block_size // BLOCK
    total = hot
    if shape.attention.mode == "hybrid":
        total += engine.num_warm_blocks * layout.warm_block_bytes
    for name, limit, pool in (
        ("hot_bytes", config.alarms.hot_bytes, hot),
        ("total_bytes", config.alarms.total_bytes, total),
    ):
        if limit > pool:
            raise ConfigError(
                f"alarms.{name}={limit} is more than the cache's {pool} bytes: the alarm would "
                "never be raised; lower it, or 0 for a share"
            )
