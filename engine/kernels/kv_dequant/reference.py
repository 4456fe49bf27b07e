"""Numbers from codes: the torch twin is the cache's own inverse."""

from engine.kvcache.quantise import dequantise_keys as dequantise_keys_reference
from engine.kvcache.quantise import dequantise_values as dequantise_values_reference

__all__ = ["dequantise_keys_reference", "dequantise_values_reference"]
