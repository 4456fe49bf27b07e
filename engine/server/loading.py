"""load: a configuration's engine, with weights, and its text side. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.chat.base import Tokenizer
from engine.chat.chatml import ChatMLRenderer
from engine.chat.dialogue import Renderer
from engine.chat.kimi import K2Renderer, K25Renderer
from engine.chat.load import load_renderer, load_tokenizer
from engine.chat.tokenizers import ByteTokenizer
from engine.chat.vocabulary import Vocabulary
from engine.config import EngineConfig
from engine.errors import ChatError
from engine.kvcache.config import BLOCK, TierConfig
from engine.kvcache.layout import CacheLayout
from engine.light.engine import LightEngine
from engine.light.relief import AlarmWatch
from engine.light.routed import RoutedRuntime
from engine.light.waiting_room import RouterConfig
from engine.model.checkpoint.load import load_model
from engine.model.config import ModelConfig
from engine.model.model import PolicyModel
from engine.model.presets import PRESETS
from engine.runtime.weights import make_weight_set
from engine.server.config import ModelSection, ServeConfig
from engine.server.format import ChatFormat
from engine.server.pairs import check_pairs
from engine.server.service import Loaded
from infra.errors import ConfigError


def load(config: ServeConfig) -> Loaded:
    """LightEngine in this process. ConfigError, CheckpointError or ChatError in one line."""
    section = config.model
    tokenizer = _tokenizer(section)
    chat = chat_format(section, tokenizer)
    policy = _policy(section, tokenizer)
    shape = policy.config
    if section.attention is not None:
        # the kind is in the weights
        attention = section.attention.model_copy(update={"kind": shape.attention.kind})
        shape = ModelConfig.model_validate(
            shape.model_copy(update={"attention": attention}).model_dump()
        )
    if tokenizer.vocab_size > shape.vocab_size:
        raise ChatError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {shape.vocab_size}; expected "
            "a tokenizer of this model (model.tokenizer)"
        )
    room = min(config.engine.max_context, shape.max_position_embeddings)
    engine_config = config.engine.model_copy(update={"max_context": room})
    layout, tiers = _cache(shape, engine_config)
    check_pairs(config, shape, engine_config, layout, tiers)
    tensors = {name: tensor.numpy() for name, tensor in policy.state_dict().items()}
    weights = make_weight_set(0, tensors, shape.model_dump(mode="json"))
    vocabulary = Vocabulary.of(tokenizer)
    engine = LightEngine(
        shape,
        engine_config,
        fetch_weights=lambda version: weights,
        vocabulary=vocabulary,
    )
    routed, fixed = _routed(engine, shape, engine_config, config.router)
    watch = AlarmWatch(engine, config.alarms, routed.refuse)
    return Loaded(
        routed,
        tokenizer,
        vocabulary,
        chat,
        engine.close,
        lambda: {**_gauges(routed, fixed), **watch.gauges()},
        warm_up=lambda: engine.warm_up(config.warm_up_rounds),
        watch=lambda: watch.run(config.alarm_every_s),
    )


def _routed(
    engine: LightEngine, shape: ModelConfig, config: EngineConfig, router: RouterConfig
) -> tuple[RoutedRuntime, dict[str, float]]:
    """Steps wait for their turn; what does not fit is told so at once. Gauges that stay."""
    layout, tiers = _cache(shape, config)

    def kv_bytes(num_tokens: int) -> int:
        return layout.bytes(num_tokens, tiers).device

    pool = config.num_blocks * layout.full_block_bytes
    if shape.attention.mode == "hybrid":
        pool += config.num_warm_blocks * layout.warm_block_bytes
    else:
        pool = pool * config.block_size // BLOCK
    routed = RoutedRuntime(
        engine,
        router,
        kv_bytes=kv_bytes,
        kv_bytes_total=pool,
        on_peak=engine.skip_summaries,
    )
    return routed, {
        "warm_compression_expected": 1 - layout.warm_block_bytes / layout.bf16_bytes(BLOCK)
        if layout.warm_block_bytes
        else 0.0,
    }


def _cache(shape: ModelConfig, config: EngineConfig) -> tuple[CacheLayout, TierConfig]:
    """Bytes of a block, and which blocks of a context lie where."""
    if shape.attention.mode == "hybrid":
        profile = shape.attention.profile
        update: dict[str, object] = {"hot": shape.attention.hot, "profile": profile}
    else:
        profile = "full"
        update = {"profile": profile, "cold": "off"}
    return CacheLayout.of(shape, profile), config.tiers.model_copy(update=update)


def _gauges(routed: RoutedRuntime, fixed: Mapping[str, float]) -> dict[str, float]:
    state = routed.state()
    return {
        **fixed,
        "queue_depth": state.waiting,
        "queue_room": state.room,
        "steps_running": state.running,
        "at_peak": float(state.at_peak),
    }


def _policy(section: ModelSection, tokenizer: Tokenizer) -> PolicyModel:
    if section.path:
        path = Path(section.path)
        if not path.exists():
            raise ConfigError(
                f"model.path = {section.path!r} does not exist; expected a model folder or a .gguf "
                "file"
            )
        return load_model(path)
    if section.preset not in PRESETS:
        raise ConfigError(
            f"model.preset = {section.preset!r}: expected one of {', '.join(PRESETS)}"
        )
    shape: ModelConfig = PRESETS[section.preset]()
    if shape.vocab_size < tokenizer.vocab_size:
        shape = ModelConfig.model_validate(
            shape.model_dump() | {"vocab_size": tokenizer.vocab_size}
        )
    return PolicyModel(shape, section.seed)


def _tokenizer(section: ModelSection) -> Tokenizer:
    if section.tokenizer == "bytes":
        return ByteTokenizer(section.words)
    path = Path(section.tokenizer or section.path)
    if not path.exists():
        raise ConfigError(
            f"model.{'tokenizer' if section.tokenizer else 'path'} = {str(path)!r} does not exist; "
            "expected a folder with a tokenizer, a .gguf file, or `bytes`"
        )
    return load_tokenizer(path)


def chat_format(section: ModelSection, tokenizer: Tokenizer) -> ChatFormat | None:
    """None = completions only. ChatError where a vocabulary lacks the markers of a format."""
    kind = section.chat
    if kind == "none":
        return None
    if kind == "kimi-k2":
        return ChatFormat(K2Renderer(tokenizer))
    if kind == "kimi-k2.5":
        return ChatFormat(K25Renderer(tokenizer, False), K25Renderer(tokenizer, True))
    if kind == "chatml":
        return ChatFormat(ChatMLRenderer(tokenizer))
    if section.tokenizer == "bytes":
        return ChatFormat(K25Renderer(tokenizer, False), K25Renderer(tokenizer, True))
    path = Path(section.tokenizer or section.path)
    instant: Renderer = load_renderer(path, thinking=False)
    if isinstance(instant, K25Renderer):
        return ChatFormat(instant, K25Renderer(instant.tokenizer, True))
    return ChatFormat(instant)
