"""Synonym clusters from a TOML file that users edit; data/synonyms.toml is the shipped one.

    [[cluster]]
    name = "late payment charge"
    confidence = 0.9
    en = ["late fee", "penalty", "liquidated damages"]
    zh = ["违约金", "滞纳金"]

A block and a question that hold any two phrases of a cluster match on it, whatever the language.
``confidence`` (0 .. 1] is the weight of that match; words of many meanings deserve a low one.
English phrases match by stems, Chinese ones as substrings; the longest phrase at a place wins.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from engine.errors import RouterError
from engine.kvcache.router.terms import is_cjk, normalise, stems
from infra.config import ConfigModel

SHIPPED = Path(__file__).parent / "data" / "synonyms.toml"


class Cluster(ConfigModel):
    name: str = Field(min_length=1)
    confidence: float = Field(gt=0.0, le=1.0)
    en: tuple[str, ...] = ()
    zh: tuple[str, ...] = ()


class _File(ConfigModel):
    cluster: tuple[Cluster, ...] = ()


@dataclass(frozen=True, slots=True)
class _Phrase:
    stems: tuple[str, ...]
    clusters: tuple[int, ...]


class SynonymTable:
    """Immutable; edit the file and load it again. RouterError on a cluster that cannot work."""

    def __init__(self, clusters: Iterable[Cluster] = ()) -> None:
        self.clusters = tuple(clusters)
        latin: dict[tuple[str, ...], list[int]] = {}
        cjk: dict[str, list[int]] = {}
        names: set[str] = set()
        for number, cluster in enumerate(self.clusters):
            if cluster.name in names:
                raise RouterError(f"two synonym clusters are called {cluster.name!r}; rename one")
            names.add(cluster.name)
            if len(cluster.en) + len(cluster.zh) < 2:
                raise RouterError(f"synonym cluster {cluster.name!r} needs at least two phrases")
            for phrase in cluster.en + cluster.zh:
                self._add(cluster.name, phrase, number, latin, cjk)
        self._by_first: dict[str, list[_Phrase]] = {}
        for words, numbers in sorted(latin.items(), key=lambda item: -len(item[0])):
            self._by_first.setdefault(words[0], []).append(_Phrase(words, tuple(numbers)))
        self._cjk = cjk
        longest_first = sorted(cjk, key=lambda phrase: (-len(phrase), phrase))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @staticmethod
    def _add(
        name: str,
        phrase: str,
        number: int,
        latin: dict[tuple[str, ...], list[int]],
        cjk: dict[str, list[int]],
    ) -> None:
        plain = normalise(phrase).strip()
        words = tuple(stems(plain))
        if not words:
            raise RouterError(f"phrase {phrase!r} of synonym cluster {name!r} holds no word")
        numbers = cjk.setdefault(plain, []) if is_cjk(plain) else latin.setdefault(words, [])
        if number not in numbers:
            numbers.append(number)

    @classmethod
    def load(cls, path: Path = SHIPPED) -> SynonymTable:
        """RouterError when the file is missing or not as the module's docstring shows."""
        try:
            return cls(_File.model_validate(tomllib.loads(path.read_text("utf-8"))).cluster)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValidationError) as error:
            raise RouterError(f"synonym file {path} cannot be used: {error}") from error

    def find(self, text: str) -> dict[str, float]:
        """Names of the clusters that the text mentions, with their confidence."""
        plain = normalise(text)
        found: list[int] = []
        for match in self._pattern.finditer(plain):
            found += self._cjk[match.group()]
        words = stems(plain)
        at = 0
        while at < len(words):
            for phrase in self._by_first.get(words[at], ()):
                if tuple(words[at : at + len(phrase.stems)]) == phrase.stems:
                    found += phrase.clusters
                    at += len(phrase.stems) - 1
                    break
            at += 1
        return {self.clusters[n].name: self.clusters[n].confidence for n in sorted(set(found))}
