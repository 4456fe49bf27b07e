"""Sampled tokens of one choice: what is text of them, and how their logprobs are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.chat.base import Tokenizer
from engine.chat.vocabulary import Vocabulary
from engine.server.generate import Ended, Piece
from engine.server.job import Job
from engine.server.stops import StopFilter

MIN_LOGPROB = -9999.0
"""Told for minus infinity, which JSON cannot carry (as vLLM does)."""


@dataclass(slots=True)
class Sampled:
    """All tokens of one choice; ``push`` and ``end`` give the ids whose text may be told."""

    tokenizer: Tokenizer
    vocabulary: Vocabulary
    job: Job
    hidden: frozenset[int]
    """Ids that end the answer and are no part of its text: a request's stop_token_ids."""
    token_ids: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self._stops = StopFilter(self.job.stop_texts, self.vocabulary.bytes_of)

    _stops: StopFilter = field(init=False)

    def push(self, piece: Piece) -> list[int]:
        self.token_ids += piece.token_ids
        return self._known(self._stops.push(piece.token_ids))

    def end(self, ended: Ended) -> list[int]:
        ids, rest = self._stops.finish(ended.stop_text, include=self.job.include_stop)
        known = self._known(ids)
        # half a token: ids of its text, which decode to the same bytes
        return known + self.tokenizer.encode(rest.decode("utf-8", "surrogateescape"))

    def _known(self, ids: Sequence[int]) -> list[int]:
        """A model may have more ids than its vocabulary; those are no text."""
        size = len(self.vocabulary)
        return [i for i in ids if i < size and i not in self.hidden]


def finish_reason(ended: Ended, num_calls: int = 0) -> str:
    """OpenAI's word."""
    if ended.finish != "stop":
        return "length"
    return "tool_calls" if num_calls else "stop"


def stop_reason(ended: Ended, ends: Sequence[int]) -> str | int | None:
    """The stop text or id of the request that ended it; "deadline", "cancelled"; None where it
    ended by itself (``ends``) or was long enough."""
    if ended.finish == "stop":
        return ended.stop_text if ended.stop_id is None or ended.stop_id in ends else ended.stop_id
    return None if ended.finish == "length" else ended.finish


class TokenText:
    """Names of tokens in logprobs."""

    def __init__(self, vocabulary: Vocabulary, as_ids: bool) -> None:
        self._vocabulary = vocabulary
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._vocabulary.bytes_of(token_id).decode("utf-8", "replace")

    def one(self, token_id: int, logprob: float) -> dict[str, Any]:
        """OpenAI's TopLogprob."""
        return {
            "token": self.name(token_id),
            "logprob": number(logprob),
            "bytes": list(self._vocabulary.bytes_of(token_id)),
        }

    def entries(self, piece: Piece, num_top: int) -> list[dict[str, Any]]:
        """OpenAI's logprobs.content of a piece."""
        entries: list[dict[str, Any]] = []
        for row, (token_id, logprob) in enumerate(
            zip(piece.token_ids, piece.logprobs.tolist(), strict=True)
        ):
            top = [self.one(i, value) for i, value in alternatives(piece, row, num_top)]
            entries.append({**self.one(token_id, logprob), "top_logprobs": top})
        return entries


def alternatives(piece: Piece, row: int, num_top: int) -> list[tuple[int, float]]:
    """(id, logprob) of the likeliest tokens at one place, likeliest first."""
    if not num_top or piece.top_ids is None or piece.top_logprobs is None:
        return []
    pairs = zip(piece.top_ids[row].tolist(), piece.top_logprobs[row].tolist(), strict=True)
    return [(i, value) for i, value in pairs if i >= 0]


def number(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
