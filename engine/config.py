"""Knobs of LightEngine; no torch here, configurations must load without it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from engine.kvcache.config import ColdRouterConfig, HotZoneConfig, TierConfig
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
    cold_router: ColdRouterConfig | None = None
    """Hybrid attention: bring the cold blocks back that a turn's new tokens ask for. None: only
    ``rewarm_kv`` does. The engine then needs ``text_of``, a callable from token ids to text."""
    hot_zone: HotZoneConfig | None = None
    """Hybrid attention, not in deterministic mode: the hot zone follows what attention does. None:
    it is ``model.attention.hot``."""
    block_size: int = Field(default=32, ge=1)
    """Tokens a KV block; also the step in which attention reads the cache. Hybrid attention: 32."""
    max_contexts: int = Field(default=1024, ge=1)
    max_rows: int = Field(default=512, ge=32)
    """Token rows (decode and prefill together) a forward step computes at most."""
    split_batches: int = Field(default=0, ge=0)
    """Contexts computed at once when more than twice as many are ready: the seed splits batches of
    more than 8 into pieces of 4, which is 4 here. 0 = never, because pieces cost more than half:
    458 against 1,140 tokens a CPU second (engine.bench.load, part settings)."""
    deterministic: bool = True
    """Row bits independent of batch, slot and chunking: every matrix product runs in tiles of 32
    rows, checked on this machine at start. False lets the library pick kernels by batch size."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Who computes routed experts and, in hybrid attention, writes and reads the cache: triton
    (engine.kernels), or torch and native code. auto: triton where the model lies on a GPU, torch
    elsewhere. On a CPU triton means its interpreter, for tests: TRITON_INTERPRET=1."""
    seed: int = Field(default=0, ge=0, lt=2**64)
    """Seeds the draws of contexts whose policy names none."""
    compute: Literal["exact", "auto", "fast"] = "exact"
    """exact: torch, op by op. fast: the native step (dense models, AVX-512 with BF16), refused
    where it cannot run. auto: fast where it can run, else exact in float32, with a line in the log.
    The last two need ``deterministic = false``."""
    weights: Literal["float32", "bfloat16", "int8", "int4"] = "float32"
    """How the native step stores matrices. int8, int4: whole numbers times a scale for each
    ``weight_group`` inputs of an output; norms and sums stay float32. int8 costs SmolLM2 .0012 nats
    a token, int4 .40: for trials of speed only."""
    weight_group: Literal[32, 64] = 32
    kv_dtype: Literal["float32", "bfloat16"] = "float32"
    """How the native step stores keys and values."""
    num_threads: int | None = Field(default=None, ge=1)
    """Threads of the native step; None: torch's number, one in a Ray worker, else all cores."""

    @model_validator(mode="after")
    def _native_is_asked_for(self) -> Self:
        if self.compute != "exact":
            if self.deterministic:
                raise ValueError(
                    f"engine.compute='{self.compute}' does not keep row bits; set "
                    "engine.deterministic=false or engine.compute='exact'"
                )
            return self
        for name in ("weights", "kv_dtype"):
            value = getattr(self, name)
            if value != "float32":
                raise ValueError(
                    f"engine.{name}='{value}', but engine.compute='exact' computes in float32; set "
                    "engine.compute='auto' or 'fast' (and engine.deterministic=false)"
                )
        return self
