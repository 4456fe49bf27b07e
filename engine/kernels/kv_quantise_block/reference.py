"""Coding blocks that leave the hot zone: the torch twin is the cache's own quantiser."""

from engine.kvcache.quantise import quantise_keys as quantise_keys_reference
from engine.kvcache.quantise import quantise_values as quantise_values_reference

__all__ = ["quantise_keys_reference", "quantise_values_reference"]
