"""What a cached token takes: byte account of a model's KV by tier, as a formula.

Shapes: G key-value heads, D key size, V value size. Latent attention (MLA) caches one head of
[latent | rotated key]; the value is the latent and takes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.kvcache.config import TierConfig
from engine.kvcache.quantise import BLOCK, VALUE_GROUP, Profile
from engine.kvcache.tiers import cold_end, warm_end

FULL_BYTES = 2
"""bf16, the baseline of every saving."""
HEADER_BYTES = 128
"""Of a cold record, see records.py."""
PAGE = 4096
"""Records end at a page, so that each can be mapped alone."""


class CachedShape(Protocol):
    """What a model's config says of its cache (engine.model.config.ModelConfig does)."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def cached_heads(self) -> int: ...
    @property
    def cached_key_dim(self) -> int: ...
    @property
    def cached_value_dim(self) -> int: ...
    @property
    def is_mla(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class TierBytes:
    """Bytes of one context: ``sink``, ``hot`` and ``warm`` on the device, ``cold`` in host memory
    or on disk."""

    sink: int
    hot: int
    warm: int
    cold: int

    @property
    def device(self) -> int:
        return self.sink + self.hot + self.warm


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """What all contexts hold, shared blocks once. ``warm_bf16``: the warm blocks' keys and values
    in bf16, so that 1 - warm / warm_bf16 is what their codes save."""

    hot: int
    warm: int = 0
    cold: int = 0
    warm_bf16: int = 0


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Sizes of one model's cache. ``full_bytes``: of a number in full precision."""

    num_layers: int
    heads: int
    key_dim: int
    value_dim: int
    profile: Profile = "k8v8"
    full_bytes: int = FULL_BYTES
    latent: bool = False
    """The value is the first ``value_dim`` numbers of the key."""

    @classmethod
    def of(cls, model: CachedShape, profile: Profile, full_bytes: int = 4) -> CacheLayout:
        return cls(
            model.num_hidden_layers,
            model.cached_heads,
            model.cached_key_dim,
            model.cached_value_dim,
            profile,
            full_bytes,
            latent=model.is_mla,
        )

    @property
    def full_block_bytes(self) -> int:
        """A block in full precision, all layers."""
        numbers = self.key_dim + (0 if self.latent else self.value_dim)
        return self.num_layers * self.heads * BLOCK * numbers * self.full_bytes

    @property
    def warm_block_bytes(self) -> int:
        """A block in codes, all layers; 0 in profile full, which has none."""
        if self.profile == "full":
            return 0
        return self.num_layers * self.heads * (self._key_bytes + self._value_bytes)

    @property
    def _key_bytes(self) -> int:
        scales = 1 if self.profile == "literal" else self.key_dim
        return BLOCK * self.key_dim + 4 * scales

    @property
    def _value_bytes(self) -> int:
        if self.latent:
            return 0
        if self.profile == "k8v4":
            return BLOCK * (self.value_dim // 2 + 4 * -(-self.value_dim // VALUE_GROUP))
        return BLOCK * self.value_dim + 2 * (1 if self.profile == "literal" else BLOCK)

    @property
    def record_bytes(self) -> int:
        """A cold block, all layers, with header and padding."""
        return -(-(HEADER_BYTES + self.warm_block_bytes) // PAGE) * PAGE

    def bytes(self, context: int, config: TierConfig) -> TierBytes:
        """What a context of ``context`` tokens takes at a step boundary; ``config.profile`` is
        that of the layout."""
        assert config.profile == self.profile, f"{config.profile} is not {self.profile}"
        blocks = -(-context // BLOCK)
        warm_from, hot_from = cold_end(context, config), warm_end(context, config)
        return TierBytes(
            sink=min(blocks, 1) * self.full_block_bytes,
            hot=max(0, blocks - hot_from) * self.full_block_bytes,
            warm=(hot_from - warm_from) * self.warm_block_bytes,
            cold=(warm_from - 1) * self.record_bytes,
        )

    def bf16_bytes(self, context: int) -> int:
        """The same context in bf16, to the token: no blocks, no tiers."""
        numbers = self.key_dim + (0 if self.latent else self.value_dim)
        return context * self.num_layers * self.heads * numbers * FULL_BYTES

    def saving(self, context: int, config: TierConfig) -> float:
        """Share of bf16 that the device does not hold."""
        return 1 - self.bytes(context, config).device / self.bf16_bytes(context)
