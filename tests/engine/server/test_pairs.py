"""Start-up checks: settings that do not fit each other are one line before anything is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.attention.config import HybridConfig
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.kvcache.config import ColdRouterConfig, HotZoneConfig, RouterConfig, TierConfig
from engine.light.engine import LightEngine
from engine.light.waiting_room import RouterConfig as BatchRouter
from engine.model.config import AttentionConfig, ModelConfig
from engine.server.config import ServeConfig
from engine.server.loading import load
from infra.errors import ConfigError
from tests.engine.tiny import ENGINE, HYBRID, MODEL

HYBRID_SECTION: dict[str, Any] = {
    "mode": "hybrid",
    "hot": 64,
    "hybrid": {"window": 32, "topk": 8, "candidates": 32},
}


def serve(**sections: Any) -> None:
    """Load a tiny model under a configuration of one section a keyword; must fail."""
    model = {"preset": "demo", "tokenizer": "bytes", **sections.pop("model", {})}
    engine = {"max_context": 256, "num_blocks": 64, "num_warm_blocks": 64, "deterministic": False}
    engine |= sections.pop("engine", {})
    load(ServeConfig.model_validate({"model": model, "engine": engine, **sections})).close()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"engine": {"num_blocks": 7}}, "hold 224 tokens, less than one context of 256"),
        (
            {"model": {"attention": HYBRID_SECTION}, "engine": {"num_blocks": 3}},
            "attention.hot=64 takes 4 blocks in full precision, engine.num_blocks=3",
        ),
        (
            {"model": {"attention": HYBRID_SECTION}, "engine": {"num_warm_blocks": 2}},
            "one context keeps up to 4 warm blocks .* engine.num_warm_blocks=2",
        ),
        (
            {"engine": {"max_rows": 32}, "router": {"max_running": 33}},
            "lets 33 requests decode at once, engine.max_rows=32",
        ),
        (
            {"engine": {"max_rows": 32}, "router": {"max_running": 20, "growth": 1.5}},
            "lets 40 requests decode at once, engine.max_rows=32",
        ),
        ({"users": {"vip": {"kv": "tiered"}}}, "users.vip.kv='tiered'.*serves kv='full'"),
        (
            {"model": {"attention": HYBRID_SECTION}, "user": {"kv": "full"}},
            "user.kv='full'.*serves kv='tiered'",
        ),
        ({"user": {"summaries": True}}, "user.summaries=true, but nothing makes summaries"),
        ({"alarms": {"hot_bytes": 1 << 40}}, "alarms.hot_bytes=.* would never be raised"),
        ({"alarms": {"total_bytes": 1 << 40}}, "alarms.total_bytes=.* would never be raised"),
    ],
)
def test_a_server_refuses_pairs_that_do_not_fit(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        serve(**sections)
    assert "\n" not in str(caught.value)


def engine_of(model: ModelConfig, **changes: Any) -> None:
    """An engine's own checks; must fail."""
    config = EngineConfig.model_validate(ENGINE.model_dump() | changes)
    LightEngine(model, config, text_of=lambda ids: "text").close()


def hybrid(**changes: Any) -> ModelConfig:
    attention = HYBRID.attention.model_dump()
    attention["hybrid"] |= changes.pop("hybrid", {})
    return ModelConfig.model_validate(HYBRID.model_dump() | {"attention": attention | changes})


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        (HYBRID, {"block_size": 16}, "block_size=16.*blocks of 32"),
        (MODEL, {"max_context": 257}, "exceeds the model's max_position_embeddings=256"),
        (MODEL, {"hot_zone": HotZoneConfig()}, "engine.hot_zone is set, but .*mode='full'"),
        (
            MODEL,
            {"cold_router": ColdRouterConfig()},
            "engine.cold_router is set, but .*mode='full'",
        ),
        (HYBRID, {"hot_zone": HotZoneConfig()}, "with engine.deterministic=true"),
        (
            hybrid(hot=48),
            {"hot_zone": HotZoneConfig(), "deterministic": False},
            "begins at model.attention.hot=48; expected a multiple of 32",
        ),
        (
            HYBRID,
            {"cold_router": ColdRouterConfig(), "tiers": TierConfig(cold="off")},
            "engine.tiers.cold='off' sends nothing away",
        ),
        (
            HYBRID,
            {"cold_router": ColdRouterConfig(encoder="hashing", policy="best_effort")},
            "engine.cold_router.policy='best_effort' with engine.deterministic=true",
        ),
        (
            HYBRID,
            {
                "cold_router": ColdRouterConfig(
                    encoder="hashing", ranking=RouterConfig(summary_dimension=1024)
                )
            },
            "1024",
        ),
        (HYBRID, {"tiers": TierConfig(hot=64)}, "engine.tiers.hot=64, but attention.hot=32"),
        (
            hybrid(hybrid={"native": "require", "index": "quest"}),
            {},
            "native='require', but it has no index 'quest'",
        ),
        (MODEL, {"max_context": 250, "compute": "fast", "deterministic": False}, "fast"),
    ],
)
def test_an_engine_refuses_pairs_that_do_not_fit(
    model: ModelConfig, changes: dict[str, Any], words: str
) -> None:
    """``compute='fast'`` of a model with experts, the encoder's dimension against the one asked
    for, tiers against the model's section ..."""
    with pytest.raises((ConfigError, EngineError), match=words) as caught:
        engine_of(model, **changes)
    assert "\n" not in str(caught.value)


def test_summary_adapters_of_another_model_do_not_start(tmp_path: Path) -> None:
    """The seed's trap (5.1): a dimension that was written down somewhere else."""
    from engine.attention.summary_adapters import MeanAdapters
    from engine.attention.summary_files import save_adapters
    from engine.model.summaries import geometry_of

    other = ModelConfig.model_validate(HYBRID.model_dump() | {"head_dim": 32})
    path = tmp_path / "adapters.safetensors"
    save_adapters(MeanAdapters(geometry_of(other)), path, "tiny")
    with pytest.raises(EngineError, match="32") as caught:
        engine_of(hybrid(hybrid={"summary_weight": 0.5, "summary_adapters": path}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        (
            AttentionConfig,
            HYBRID_SECTION | {"hot": 16},
            "window=32 is longer than attention.hot=16",
        ),
        (HybridConfig, {"topk": 8, "candidates": 4}, "candidates = 4 is less than topk = 8"),
        (HybridConfig, {"summary_weight": 0.5}, "without summary_adapters"),
        (BatchRouter, {"max_running": 1, "reserved": 1}, "leaves nothing for the others"),
        (TierConfig, {"cold": "disk"}, "needs a directory"),
    ],
)
def test_a_section_refuses_its_own_pairs(
    section: type[Any], values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        section.model_validate(values)


def test_presets_of_scenarios_fit() -> None:
    """Each configs/serve/*.toml passes its own pairs, whatever the model."""
    from engine.server.loading import _cache
    from engine.server.pairs import check_pairs
    from infra.config import load_config

    found = sorted((Path(__file__).parents[3] / "configs" / "serve").glob("*.toml"))
    assert found
    for path in found:
        config = load_config(
            ServeConfig, [path], ['model.preset="demo"', 'model.tokenizer="bytes"']
        )
        shape = ModelConfig(max_position_embeddings=131072)
        check_pairs(config, shape, config.engine, *_cache(shape, config.engine))
