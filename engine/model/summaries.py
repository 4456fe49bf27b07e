"""Summary adapters of a model's attention section, for engine and learner alike."""

from __future__ import annotations

import functools
from pathlib import Path

from engine.attention.summary import Summaries, Summarise
from engine.attention.summary_adapters import Geometry, MeanAdapters
from engine.attention.summary_files import load_adapters
from engine.model.config import ModelConfig
from engine.model.rope import inverse_frequencies


def geometry_of(config: ModelConfig) -> Geometry:
    return Geometry(
        num_layers=config.num_hidden_layers,
        groups=config.cached_heads,
        heads=config.num_attention_heads,
        key_dim=config.cached_key_dim,
        value_dim=config.cached_value_dim,
        latent=config.is_mla,
        frequencies=tuple(inverse_frequencies(config).tolist()),
    )


def adapters_of(config: ModelConfig) -> MeanAdapters | None:
    """The frozen adapters that hybrid attention reads; None where summaries are off or plain means.
    AttentionError when the file does not fit. Read once a process and path."""
    hybrid = config.attention.hybrid
    if config.attention.mode != "hybrid" or hybrid.summary_weight == 0:
        return None
    if hybrid.summaries != "adapters" or hybrid.summary_adapters is None:
        return None
    return _load(hybrid.summary_adapters, geometry_of(config))


@functools.lru_cache(maxsize=4)
def _load(path: Path, geometry: Geometry) -> MeanAdapters:
    # no model hash here: the policy's weights go on training, its geometry does not
    loaded = load_adapters(path, geometry)
    assert isinstance(loaded, MeanAdapters), "without an encoder there is no other kind"
    return loaded


def summarise_with(adapters: MeanAdapters | None, layer: int) -> Summarise | None:
    """What attend_sequence wants for one layer."""
    if adapters is None:
        return None

    def summarise(means: Summaries) -> Summaries:
        return adapters.summarise(layer, means)

    return summarise
