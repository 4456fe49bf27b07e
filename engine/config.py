"""Knobs of LightEngine; no torch here, configurations must load without it."""

from __future__ import annotations

from pydantic import Field

from infra.config import ConfigModel


class EngineConfig(ConfigModel):
    max_context: int = Field(512, ge=1)
    """Tokens a context may hold, prompt included."""
    num_blocks: int = Field(4096, ge=1)
    """KV blocks in the pool, shared by all contexts."""
    block_size: int = Field(32, ge=1)
    """Tokens a KV block; also the step in which attention reads the cache."""
    max_contexts: int = Field(1024, ge=1)
    max_rows: int = Field(512, ge=32)
    """Token rows (decode and prefill together) a forward step computes at most."""
    deterministic: bool = True
    """Row bits independent of batch, slot and chunking: every matrix product runs in tiles of 32
    rows. False lets the library pick kernels by batch size."""
