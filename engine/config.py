"""Knobs of LightEngine; no torch here, configurations must load without it."""

from __future__ import annotations

from pydantic import Field

from engine.kvcache.config import TierConfig
from infra.config import ConfigModel


class EngineConfig(ConfigModel):
    max_context: int = Field(default=512, ge=1)
    """Tokens a context may hold, prompt included."""
    num_blocks: int = Field(default=4096, ge=1)
    """KV blocks in the pool, shared by all contexts. When they run out, idle contexts lose theirs
    first (recomputed at their next step), then the step that began last waits. Hybrid attention:
    blocks in full precision."""
    num_warm_blocks: int = Field(default=4096, ge=1)
    """Hybrid attention: blocks of older tokens, in codes."""
    tiers: TierConfig = TierConfig()
    """Hybrid attention: what of a context stays on the device, and where the rest goes. ``hot``,
    ``profile`` and ``deterministic`` are left out: the model section and this one say them."""
    block_size: int = Field(default=32, ge=1)
    """Tokens a KV block; also the step in which attention reads the cache. Hybrid attention: 32."""
    max_contexts: int = Field(default=1024, ge=1)
    max_rows: int = Field(default=512, ge=32)
    """Token rows (decode and prefill together) a forward step computes at most."""
    deterministic: bool = True
    """Row bits independent of batch, slot and chunking: every matrix product runs in tiles of 32
    rows, checked on this machine at start. False lets the library pick kernels by batch size."""
    seed: int = Field(default=0, ge=0, lt=2**64)
    """Seeds the draws of contexts whose policy names none."""
