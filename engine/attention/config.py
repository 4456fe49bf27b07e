"""Knobs of hybrid attention; no torch here, configurations must load without it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from infra.config import ConfigModel
from infra.errors import ConfigError

IndexKind = Literal["codes", "int8", "bf16", "quest", "mean", "none"]


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
    library, 130 bytes a token and head. bf16: exact scores of every far key, the oracle. quest,
    mean: blocks by bounds or by mean key, lossy. none: nothing is retrieved."""
    dense_below: int = Field(default=12288, ge=0)
    """Contexts up to this length are read whole."""
    summary_weight: float = Field(default=0.0, ge=0.0, le=1.0)
    """Weight w of block means standing for what was not retrieved, as + log w on their logits. 0
    removes them; worth it only with trained summaries."""
    native: Literal["auto", "off", "require"] = "auto"
    """The compiled decode path: when it can be built, never, or an error where it cannot."""

    @model_validator(mode="after")
    def _enough_candidates(self) -> HybridConfig:
        if self.topk_unit == "token" and self.candidates < self.topk:
            raise ValueError(
                f"candidates = {self.candidates} is less than topk = {self.topk}; raise candidates"
            )
        return self

    def check_hot(self, hot: int) -> None:
        """ConfigError when the window would reach into warm tokens."""
        if self.window > hot:
            raise ConfigError(
                f"attention window {self.window} is longer than the cache's hot zone {hot}; the "
                "window is read in full precision, so raise hot or lower window"
            )
