"""Text beside token ids, from the tokenizer the run's configuration describes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parl.report.episode import TokenText

if TYPE_CHECKING:
    from parl.config import RunConfig


def token_text(config: RunConfig) -> TokenText:
    """Decoder of the run; ChatError when an id is not of its vocabulary."""
    from engine.chat.tokenizers import ByteTokenizer

    return ByteTokenizer(config.chat.words).decode
