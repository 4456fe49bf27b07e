"""LearntIndices: what the indices int8 and mean keep of each context and layer between steps.

They take in a warm block once (KeyCodeIndex) instead of all blocks anew for every query. A block
adds D + 4 bytes a token and key-value head in int8, 4 D bytes a block and head in mean, per layer,
beside the cache and not in its account. Contexts that lose blocks, or get other ones, learn again.
"""

from __future__ import annotations

from engine.attention.config import HybridConfig
from engine.attention.index import KeyCodeIndex


class LearntIndices:
    def __init__(self, config: HybridConfig) -> None:
        self._config = config
        self._of: dict[str, dict[int, KeyCodeIndex]] = {}

    @classmethod
    def of(cls, config: HybridConfig) -> LearntIndices | None:
        """None for indices that keep nothing."""
        return cls(config) if config.index in ("int8", "mean") else None

    def index(self, context: str, layer: int) -> KeyCodeIndex:
        layers = self._of.setdefault(context, {})
        if layer not in layers:
            layers[layer] = KeyCodeIndex(self._config.index)
        return layers[layer]

    def forget(self, context: str) -> None:
        """Its codes are dropped, and may be made again of other tokens."""
        self._of.pop(context, None)
