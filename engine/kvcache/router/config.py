"""Knobs of the cold router; no torch here, configurations must load without it."""

from __future__ import annotations

from pydantic import Field

from infra.config import ConfigModel


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
