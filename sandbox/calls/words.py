"""How a key is compared: its tokens, its style-free form, the bundled words and aliases."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from functools import cache, lru_cache
from importlib import resources

_SEPARATORS = re.compile(r"[\W_]+")
# camel humps, digits and runs of any other script are tokens of their own
_TOKEN = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+|[^\W\dA-Za-z_]+")


@lru_cache(maxsize=8192)
def tokens(key: str) -> tuple[str, ...]:
    """``startDate``, ``START-DATE`` and ``start_date`` all give ("start", "date"): NFKC, camel
    humps and separators split, case folded."""
    parts = _SEPARATORS.split(unicodedata.normalize("NFKC", key))
    return tuple(token.casefold() for part in parts for token in _TOKEN.findall(part))


@lru_cache(maxsize=8192)
def style_form(key: str) -> str:
    """The tokens run together: equal forms differ in style only."""
    return "".join(tokens(key))


def folded(text: str) -> str:
    """NFKC, case and separators removed; unlike ``style_form`` it keeps every other character."""
    return re.sub(r"[\s_\-]+", "", unicodedata.normalize("NFKC", text)).casefold()


@cache
def bundled_words() -> frozenset[str]:
    """Common English words of parameter names; none of them is a typo of another."""
    lines = _data("words.txt").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


@cache
def _alias_groups() -> dict[str, frozenset[int]]:
    """Style form of a name -> the groups of the bundled table it stands in."""
    groups: dict[str, set[int]] = {}
    for number, names in enumerate(tomllib.loads(_data("aliases.toml"))["groups"]):
        for name in names:
            groups.setdefault(style_form(name), set()).add(number)
    return {name: frozenset(numbers) for name, numbers in groups.items()}


def are_aliases(one: str, other: str) -> bool:
    """Whether the bundled table says that two names mean the same parameter."""
    groups = _alias_groups()
    mine = groups.get(style_form(one))
    return mine is not None and not mine.isdisjoint(groups.get(style_form(other), ()))


def _data(name: str) -> str:
    return (resources.files("sandbox.calls") / "data" / name).read_text(encoding="utf-8")
