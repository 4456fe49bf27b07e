"""Whether a key is a misspelling of a property (T3 of facts/sandboxes.md 3.4)."""

from __future__ import annotations

import re
from collections import Counter

from sandbox.calls.distance import osa_within
from sandbox.calls.words import bundled_words, style_form, tokens

MAX_CHARS = 64
_MIN_SCHEMA_TYPO = 6
"""Shorter words have too many neighbours to suspect the schema of a typo."""
_DIGITS = re.compile(r"\d+")


def is_typo(key: str, name: str, words: frozenset[str]) -> bool:
    """Whether ``key`` may be a typo of the property ``name``; ``words``: tokens of the loaded
    tools, which like the bundled ones are never typos.

    Both ASCII, equal digits, distance at most 0, 1 or 2 by the shorter length (<= 3, 4-6, more);
    then the guards: a real word is no typo, nor is an extra word or a plural.
    """
    if len(key) > MAX_CHARS or len(name) > MAX_CHARS:
        return False
    given, wanted = style_form(key), style_form(name)
    if not (given.isascii() and wanted.isascii()):
        return False
    shorter = min(len(given), len(wanted))
    limit = 0 if shorter <= 3 else 1 if shorter <= 6 else 2
    if limit == 0 or osa_within(given, wanted, limit) is None:
        return False
    if _DIGITS.findall(given) != _DIGITS.findall(wanted):
        return False
    given_tokens, wanted_tokens = tokens(key), tokens(name)
    if len(given_tokens) != len(wanted_tokens):
        return _resegmented(given_tokens, wanted_tokens, given, words)
    last = len(given_tokens) - 1
    pairs = enumerate(zip(given_tokens, wanted_tokens, strict=True))
    return all(
        _may_differ(one, other, index == last, words)
        for index, (one, other) in pairs
        if one != other
    )


def _may_differ(given: str, wanted: str, is_last: bool, words: frozenset[str]) -> bool:
    if _plural_of(given, wanted) or _plural_of(wanted, given):
        return not is_last  # the last token's plural may mean a list
    if osa_within(given, wanted, max(len(given), len(wanted)) - 1) is None:
        return False  # nothing of the token is left: vs_currency is not to_currency
    if not _is_word(given, words):
        return True
    # a real word close to something that is none: the typo is the schema's
    return (
        min(len(given), len(wanted)) >= _MIN_SCHEMA_TYPO
        and not _is_word(wanted, frozenset())
        and osa_within(given, wanted, 1) is not None
    )


def _resegmented(
    given: tuple[str, ...], wanted: tuple[str, ...], form: str, words: frozenset[str]
) -> bool:
    """Token counts differ: a separator is missing or extra. An extra or missing token is not."""
    extra = Counter(given) - Counter(wanted)
    missing = Counter(wanted) - Counter(given)
    whole = "".join(wanted)
    if not extra or not missing or _plural_of(form, whole) or _plural_of(whole, form):
        return False
    return not _is_word(form, words) and not all(_is_word(token, words) for token in extra)


def _is_word(token: str, words: frozenset[str]) -> bool:
    known = bundled_words()
    return (
        token in words
        or token in known
        or (token.endswith("s") and (token[:-1] in known or token[:-1] in words))
    )


def _plural_of(one: str, other: str) -> bool:
    return one in (other + "s", other + "es")
