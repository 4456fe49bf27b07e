"""Match the keys of one object with the properties of its schema (facts/sandboxes.md 3.4).

Tier by tier (style, alias, fuzzy), each key must fit exactly one property and each property
exactly one key; order, type and required never break a tie. A filled property is never written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sandbox.calls.policy import KeyTier
from sandbox.calls.typos import MAX_CHARS, is_typo
from sandbox.calls.words import are_aliases, style_form

MAX_UNKNOWN = 64
"""More unknown keys than this (of one object, different ones of one call) are not looked at."""


@dataclass(slots=True)
class KeyMatch:
    """``renamed``: key -> (property, tier); ``dropped``: key -> the property that already holds an
    equal value; ``ambiguous``: key -> candidates; ``conflict``: key -> the property that holds
    another value. Keys in none of them stay unknown."""

    renamed: dict[str, tuple[str, KeyTier]] = field(default_factory=dict)
    dropped: dict[str, tuple[str, KeyTier]] = field(default_factory=dict)
    ambiguous: dict[str, tuple[str, ...]] = field(default_factory=dict)
    conflict: dict[str, str] = field(default_factory=dict)


class KeyMatcher:
    """Matches objects of one call. ``aliases``: property -> further names; ``words``: see
    ``is_typo``. Remembers what it looked up, so equal objects of a list cost one search."""

    def __init__(
        self,
        tier: KeyTier,
        aliases: Mapping[str, Iterable[str]] | None = None,
        words: frozenset[str] = frozenset(),
    ) -> None:
        self.tier = tier
        self._words = words
        self._aliases = {
            name: frozenset(style_form(other) for other in others)
            for name, others in (aliases or {}).items()
        }
        self._seen: dict[tuple[str, KeyTier, tuple[str, ...]], tuple[str, ...]] = {}
        self._shapes: dict[tuple[tuple[str, ...], tuple[str, ...]], KeyMatch | None] = {}
        self._looked_at: set[str] = set()

    def match(self, given: Mapping[str, Any], properties: tuple[str, ...]) -> KeyMatch | None:
        """What to do with the keys of ``given`` that are not in ``properties``, None for nothing;
        pure. Objects with equal keys are answered from memory."""
        shape = (tuple(given), properties)
        if shape in self._shapes:
            return self._shapes[shape]
        result = self._matched(given, properties)
        if result is None or not (result.dropped or result.conflict or result.ambiguous):
            self._shapes[shape] = result  # no value was looked at
        return result

    def _matched(self, given: Mapping[str, Any], properties: tuple[str, ...]) -> KeyMatch | None:
        result = KeyMatch()
        known = set(properties)
        pending = [key for key in given if key not in known]
        if self.tier is KeyTier.EXACT or not 0 < len(pending) <= MAX_UNKNOWN:
            return None
        pending = [key for key in pending if len(key) <= MAX_CHARS and self._may_look_at(key)]
        filled = {name: given[name] for name in properties if name in given}
        for tier in (KeyTier.STYLE, KeyTier.ALIAS, KeyTier.FUZZY):
            if tier > self.tier or not pending:
                break
            options = {key: self._candidates(key, properties, tier) for key in pending}
            if tier is KeyTier.FUZZY:
                options = {
                    key: tuple(name for name in names if name not in filled)
                    for key, names in options.items()
                }
                self._settle_typos(options, result)
            else:
                self._settle(options, tier, given, filled, result)
            done = {*result.renamed, *result.dropped, *result.ambiguous, *result.conflict}
            pending = [key for key in pending if key not in done]
            filled |= {name: given[key] for key, (name, _) in result.renamed.items()}
        return result

    def _may_look_at(self, key: str) -> bool:
        if key not in self._looked_at and len(self._looked_at) >= MAX_UNKNOWN:
            return False
        self._looked_at.add(key)
        return True

    def _candidates(self, key: str, properties: tuple[str, ...], tier: KeyTier) -> tuple[str, ...]:
        cached = self._seen.get((key, tier, properties))
        if cached is None:
            fits = self._fits(key, tier)
            cached = tuple(name for name in properties if fits(name))
            self._seen[key, tier, properties] = cached
        return cached

    def _fits(self, key: str, tier: KeyTier) -> Callable[[str], bool]:
        form = style_form(key)
        if tier is KeyTier.STYLE:
            return lambda name: form != "" and style_form(name) == form
        if tier is KeyTier.ALIAS:
            return lambda name: form in self._aliases.get(name, ()) or are_aliases(key, name)
        return lambda name: is_typo(key, name, self._words)

    @staticmethod
    def _settle(
        options: Mapping[str, tuple[str, ...]],
        tier: KeyTier,
        given: Mapping[str, Any],
        filled: Mapping[str, Any],
        result: KeyMatch,
    ) -> None:
        wanted: dict[str, list[str]] = {}
        for key, names in options.items():
            if len(names) == 1:
                wanted.setdefault(names[0], []).append(key)
            elif names:
                result.ambiguous[key] = names
        for name, keys in wanted.items():
            if name in filled:
                for key in keys:
                    if _same(given[key], filled[name]):
                        result.dropped[key] = (name, tier)
                    else:
                        result.conflict[key] = name
            elif all(_same(given[key], given[keys[0]]) for key in keys[1:]):
                result.renamed[keys[0]] = (name, tier)
                result.dropped |= dict.fromkeys(keys[1:], (name, tier))
            else:
                result.ambiguous |= dict.fromkeys(keys, (name,))

    @staticmethod
    def _settle_typos(options: Mapping[str, tuple[str, ...]], result: KeyMatch) -> None:
        claims: dict[str, int] = {}
        for names in options.values():
            for name in names:
                claims[name] = claims.get(name, 0) + 1
        for key, names in options.items():
            if len(names) == 1 and claims[names[0]] == 1:
                result.renamed[key] = (names[0], KeyTier.FUZZY)
            elif names:
                result.ambiguous[key] = names


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON: True is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
