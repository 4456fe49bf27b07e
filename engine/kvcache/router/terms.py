"""Text to lexical terms: English stems, CJK bigrams, numbers. Pure functions."""

from __future__ import annotations

import re
import unicodedata
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_TOKEN = re.compile(rf"[{_CJK}]+|[0-9]+(?:[.,][0-9]+)*|(?:(?![{_CJK}])[^\W\d_])+")
_IS_CJK = re.compile(rf"[{_CJK}]")

# words that say nothing about which block is meant, the question's own among them
_STOP_WORDS = frozenset(
    (Path(__file__).parent / "data" / "stop_words.txt").read_text("utf-8").split()
)


def normalise(text: str) -> str:
    """Full-width forms become plain ones, capitals small letters."""
    return unicodedata.normalize("NFKC", text).lower()


def is_cjk(text: str) -> bool:
    return _IS_CJK.search(text) is not None


def cjk_share(text: str) -> float:
    """Share of CJK among the letters, a Latin word counting as one letter."""
    tokens = [token for token in _TOKEN.findall(normalise(text)) if not token[0].isdecimal()]
    cjk = sum(len(token) for token in tokens if is_cjk(token))
    latin = sum(not is_cjk(token) for token in tokens)
    return cjk / (cjk + latin) if cjk else 0.0


def stems(text: str) -> list[str]:
    """Every token of normalised text in order: stems, numbers, whole CJK runs."""
    return [
        token if is_cjk(token) or not token.isalpha() else _stem(token)
        for token in _TOKEN.findall(text)
    ]


def terms(text: str) -> list[str]:
    """What postings hold of a text, with repeats: stems and numbers, and bigrams of CJK runs (a
    run of one character is itself a term); stop words left out."""
    result: list[str] = []
    for token in _TOKEN.findall(normalise(text)):
        if is_cjk(token):
            bigrams = [token[i : i + 2] for i in range(len(token) - 1)] or [token]
            result += [bigram for bigram in bigrams if bigram not in _STOP_WORDS]
        elif token not in _STOP_WORDS:
            result.append(_stem(token) if token.isalpha() else token)
    return result


@lru_cache(maxsize=65536)
def _stem(word: str) -> str:
    return _stemmer().stemWord(word)


@cache
def _stemmer() -> Any:
    import snowballstemmer

    return snowballstemmer.stemmer("english")
