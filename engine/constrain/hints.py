"""A short text that a regular expression matches, found in its syntax tree."""

from __future__ import annotations

import re
import warnings

# the standard library's parser of regular expressions; stable since Python 3.11
from re import _constants as sre  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser as sre_parse  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

_CATEGORIES = {
    sre.CATEGORY_DIGIT: "0",
    sre.CATEGORY_WORD: "a",
    sre.CATEGORY_SPACE: " ",
    sre.CATEGORY_NOT_DIGIT: "a",
    sre.CATEGORY_NOT_WORD: "-",
    sre.CATEGORY_NOT_SPACE: "a",
}
_SAMPLE = "a0A -_.,:;/!#@+*()[]{}<>=?&%$^~|'`\"\\\n\té中"


def shortest_match(pattern: str) -> str | None:
    """A text that ``re.search`` finds ``pattern`` in, as short as its tree shows; None where it
    cannot tell (look-around, back references, syntax of another dialect)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            text = _of(sre_parse.parse(pattern))
            return text if re.search(pattern, text) else None
        except (re.error, ValueError, OverflowError, RecursionError):
            return None


def _of(tree: Any) -> str:
    return "".join(_node(op, argument) for op, argument in tree)


def _node(op: Any, argument: Any) -> str:
    if op is sre.LITERAL:
        return chr(argument)
    if op is sre.NOT_LITERAL:
        return next(c for c in _SAMPLE if ord(c) != argument)
    if op is sre.ANY:
        return "a"
    if op is sre.AT:
        return ""
    if op is sre.IN:
        return _member(argument)
    if op is sre.BRANCH:
        return min((_of(branch) for branch in argument[1]), key=len)
    if op is sre.SUBPATTERN:
        return _of(argument[3])
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        return _of(argument[2]) * argument[0]
    if op is sre.ATOMIC_GROUP:
        return _of(argument)
    raise ValueError(f"no example for {op}")


def _member(items: Any) -> str:
    if items[0][0] is not sre.NEGATE:
        op, argument = items[0]
        if op is sre.LITERAL:
            return chr(argument)
        return chr(argument[0]) if op is sre.RANGE else _CATEGORIES[argument]
    return next(c for c in _SAMPLE if not any(_in(c, item) for item in items[1:]))


def _in(character: str, item: Any) -> bool:
    op, argument = item
    if op is sre.LITERAL:
        return ord(character) == argument
    if op is sre.RANGE:
        return argument[0] <= ord(character) <= argument[1]
    kinds = {
        sre.CATEGORY_DIGIT: character.isdigit(),
        sre.CATEGORY_WORD: character.isalnum() or character == "_",
        sre.CATEGORY_SPACE: character.isspace(),
    }
    negated = {
        sre.CATEGORY_NOT_DIGIT: sre.CATEGORY_DIGIT,
        sre.CATEGORY_NOT_WORD: sre.CATEGORY_WORD,
        sre.CATEGORY_NOT_SPACE: sre.CATEGORY_SPACE,
    }
    return not kinds[negated[argument]] if argument in negated else kinds[argument]
