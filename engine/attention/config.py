"""Knobs of hybrid attention; no torch here, configurations must load without it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from infra.config import ConfigModel
from infra.errors import ConfigError

IndexKind = Literal["codes", "int8", "bf16", "latent", "quest", "mean", "none"]


class HybridConfig(ConfigModel):
    window: int = Field(default=1024, ge=1)
    """Last tokens every query reads. At most the cache's ``hot``: a warm token is never in it."""
    topk: int = Field(default=64, ge=1)
    """Far tokens (or blocks of 32, see topk_unit) retrieved for each query head."""
    candidates: int = Field(default=256, ge=1)
    """Tokens per key-value head that the scan passes on to exact scoring. Unit block: at least
    topk blocks are passed on."""
    topk_unit: Literal["token", "block"] = "token"
    topk_shared: bool = False
    """One choice for all query heads of a key-value head."""
    share: Literal["max", "softmax"] = "max"
    """How the scores of a group's heads become one: the largest, or the sum of their softmax
    weights (for latent attention, where very many heads share a choice)."""
    index: IndexKind = "codes"
    """codes: the top two bits of the stored keys. int8: a copy in 8 bits, quick without the native
    library, 130 bytes a token and head. bf16: exact scores of every far key, the oracle. latent:
    some channels of latent attention's keys, see latent_dims. quest, mean: blocks by bounds or by
    mean key, lossy. none: nothing is retrieved."""
    latent_dims: int = Field(default=64, ge=4, multiple_of=4)
    """Index latent: the latent's first channels that are scored, beside all rotary ones. Worth most
    once the model's latents are turned to their principal axes (engine.model.latent_axes)."""
    dense_below: int = Field(default=12288, ge=0)
    """Contexts up to this length are read whole."""
    summary_weight: float = Field(default=0.0, ge=0.0, le=1.0)
    """Weight w of block summaries standing for what is not read, warm or cold, as + log w on their
    logits. 0 removes them; worth it only with trained summaries."""
    summaries: Literal["adapters", "mean"] = "adapters"
    """adapters: trained ones from ``summary_adapters``, needed when the weight is above 0. mean:
    plain means of keys and values, which make attention worse (docs/claims.md)."""
    summary_adapters: Path | None = None
    """File of ``parl attention train-summaries``. Part of the policy: engine and learner read it
    under the same path."""
    native: Literal["auto", "off", "require"] = "auto"
    """The compiled decode path: when it can be built, never, or an error where it cannot."""

    @model_validator(mode="after")
    def _enough_candidates(self) -> HybridConfig:
        if self.topk_unit == "token" and self.candidates < self.topk:
            raise ValueError(
                f"candidates = {self.candidates} is less than topk = {self.topk}; raise candidates"
            )
        return self

    @model_validator(mode="after")
    def _summaries_are_there(self) -> HybridConfig:
        if self.summary_weight > 0 and self.summaries == "adapters" and not self.summary_adapters:
            raise ValueError(
                f"summary_weight = {self.summary_weight:g} without summary_adapters: untrained "
                "summaries make attention worse. Train some (parl attention train-summaries), or "
                "set summaries = 'mean' to take plain means all the same"
            )
        return self

    @classmethod
    def for_latent(cls, **changes: object) -> HybridConfig:
        """Latent attention: one choice of 2,048 tokens for all heads, by the sum of their softmax
        weights over reduced keys (facts/kv-attention.md 2.2). 64 would be few for 64 heads."""
        base = {
            "topk": 2048,
            "candidates": 8192,
            "topk_shared": True,
            "share": "softmax",
            "index": "latent",
        }
        return cls.model_validate(base | changes)

    def check_hot(self, hot: int) -> None:
        """ConfigError when the window would reach into warm tokens."""
        if self.window > hot:
            raise ConfigError(
                f"attention window {self.window} is longer than the cache's hot zone {hot}; the "
                "window is read in full precision, so raise hot or lower window"
            )
