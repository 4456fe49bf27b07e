"""Knobs of the tiered KV cache, its router and its hot zone.

No torch here: configurations must load without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from infra.config import ConfigModel

BLOCK = 32
"""Tokens of a block."""
RewarmPolicy = Literal["best_effort", "wait_complete", "timeout"]
"""See engine.kvcache.tiered.TieredKV.rewarm."""


class TierConfig(ConfigModel):
    hot: int = Field(default=2048, ge=0)
    """Newest tokens in full precision; the first block always is."""
    warm: int = Field(default=65536, ge=0, multiple_of=BLOCK)
    """Tokens before those that stay on the device in codes; older ones are cold."""
    profile: Literal["k8v8", "k8v4", "literal", "full"] = "k8v8"
    """Codes of warm blocks, see engine.kvcache.quantise. full: everything is hot."""
    cold: Literal["host", "disk", "off"] = "host"
    """Where cold blocks go: host memory, host memory and then a file, or nowhere (blocks stay warm
    however old they are)."""
    directory: Path | None = None
    """Folder of the file of cold blocks; needed for disk."""
    host_bytes: int = Field(default=4 << 30, ge=0)
    """Host memory for cold blocks. When it is full, disk moves the oldest ones to the file and host
    keeps new ones on the device."""
    deterministic: bool = True
    """A block's tier depends on position and context length only, so that a learner can repeat it:
    no demotion under memory pressure, re-warming waits until it is complete."""
    debug_nan: bool = False
    """Fill freed blocks with NaN, so that reading one shows."""

    @model_validator(mode="after")
    def _folder_for_disk(self) -> Self:
        if self.cold == "disk" and self.directory is None:
            raise ValueError("cold = 'disk' needs a directory; name a folder on a local disk")
        return self


class RouterConfig(ConfigModel):
    summary_dimension: int | None = Field(default=None, ge=1)
    """What trained adapters or stored summaries were made for; None takes the encoder's word. A
    number other than the encoder's is an error at start, not a vector cut or padded later."""
    encoder_weight: float = Field(default=0.7, ge=0.0, le=1.0)
    """Share of the summary's cosine in a score, the rest is lexical; each over the best of its
    kind. Chosen on the tune half of the paraphrase set, as is the next."""
    encoder_weight_cjk: float = Field(default=0.5, ge=0.0, le=1.0)
    """The same for questions in Chinese, Japanese or Korean script, which the packaged MiniLM
    cannot read; in between for mixed ones. A multilingual encoder deserves encoder_weight."""
    fallback_below: float = Field(default=0.5, ge=0.0, le=1.0)
    """Postings alone choose the candidates when their confidence is at least this; below it the
    summaries of all cold blocks are searched. 1 searches them always, 0 never."""
    neighbours: int = Field(default=0, ge=0)
    """Cold blocks on either side of a hit that come with it: text does not end where a block of 32
    tokens does. They count against the budget."""
    k1: float = Field(default=1.2, ge=0.0)
    """BM25: how soon repeats of a word stop counting."""
    b: float = Field(default=0.75, ge=0.0, le=1.0)
    """BM25: how much long blocks are held back."""


class ColdRouterConfig(ConfigModel):
    """At the start of a turn: which cold blocks the new tokens ask for, and bringing them back."""

    budget: int = Field(default=16, ge=1)
    """Blocks fetched a turn at most."""
    policy: RewarmPolicy = "wait_complete"
    """wait_complete: the turn begins when all are there; the only one in deterministic mode.
    timeout: waits ``timeout_s`` at most. best_effort: does not wait. What comes later is read from
    then on."""
    timeout_s: float = Field(default=1.0, ge=0.0)
    question_tokens: int = Field(default=256, ge=1)
    """Of a turn's new tokens the last so many are the question."""
    encoder: Literal["minilm", "hashing", "none"] = "minilm"
    """Summaries of cold blocks: the packaged MiniLM, feature hashing (knows spelling, no meaning,
    needs no weights), or none: words and synonyms only."""
    synonyms: Path | None = None
    """Synonym file; None is the shipped one."""
    ranking: RouterConfig = RouterConfig(neighbours=1)


class HotZoneConfig(ConfigModel):
    mode: Literal["absolute", "quantile"] = "quantile"
    step: int = Field(default=512, ge=BLOCK, multiple_of=BLOCK)
    """Tokens of one change."""
    patience: int = Field(default=3, ge=1)
    """Steps in a row that must ask for a change."""
    maximum: int = Field(default=8192, ge=BLOCK, multiple_of=BLOCK)
    """The zone never grows beyond; it never shrinks below what it started with."""
    mean_over: int = Field(default=10, ge=1)
    """Steps of the moving mean of entropy."""
    low: float = Field(default=0.3, ge=0.0, le=1.0)
    """absolute: grow below this entropy."""
    high: float = Field(default=0.7, ge=0.0, le=1.0)
    """absolute: back to the start above this entropy."""
    calibration: int = Field(default=256, ge=16)
    """quantile: steps that are only watched; thresholds are theirs from then on."""
    low_quantile: float = Field(default=0.1, gt=0.0, lt=1.0)
    high_quantile: float = Field(default=0.9, gt=0.0, lt=1.0)
    edge_share: float = Field(default=0.02, gt=0.0, lt=1.0)
    """quantile: mass just beyond the edge, of all but the sink's, below which nothing is gained by
    growing."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not (self.low < self.high and self.low_quantile < self.high_quantile):
            raise ValueError(
                f"low {self.low}, high {self.high}, low_quantile {self.low_quantile}, "
                f"high_quantile {self.high_quantile}: each low must be less than its high"
            )
        return self
