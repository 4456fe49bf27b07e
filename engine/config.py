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
    report_codes: bool = True
    """Hybrid attention: steps report the codes of blocks that turned warm, for learners that read
    the same ones (learner.replay_codes). With L layers, G cached heads, keys of D and values of V
    numbers a token takes L G (9 D / 8 + V + 2) bytes in profile k8v8, without V + 2 in latent
    attention (engine.kvcache.payload): in host memory while its context or a fork lives, then in
    the ledger. Four layers of two heads of 32: 560 bytes; 61 latent layers of 576 (K2.5): 39,528,
    so 5 GB for 128K tokens; switch it off where that is more than agreement in the last digits of
    a logprob is worth, and where nobody learns."""
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
