"""Facts of contracts and support in blocks of about 32 tokens, and questions in other words.

The texts are templates in data/: names and numbers are drawn, questions get an opening. Facts are
split in two halves by a hash of their id: choose on "tune", report on "test". The first author also
wrote the synonym file, as a glossary of the trade and without looking at what the test half needs,
so its gain on these questions is an upper estimate. The second author, as other people would, asked
about the same facts and about further ones without opening that file; all further facts are "test".
"""

from __future__ import annotations

import hashlib
import random
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.kvcache.router.terms import terms

DATA = Path(__file__).parent / "data"
Half = Literal["tune", "test"]
Language = Literal["en", "zh"]
Author = Literal["first", "second"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")

PARTIES: dict[str, tuple[str, ...]] = {
    "en": ("Norvik Ltd", "Halden AG", "Brightwater", "Orsolo Inc", "Kestrel Labs", "Maridan"),
    "zh": ("远航公司", "华岭科技", "明泽集团", "北辰物业", "青禾贸易", "云杉软件"),
}
OPENINGS: dict[str, tuple[str, ...]] = {
    "en": ("", "", "Hi! ", "One more thing: ", "My colleague wonders: ", "Urgent. "),
    "zh": ("", "", "您好，", "请教一下：", "同事想知道，", "麻烦看看，"),
}
_SLOT = re.compile(r"\{(party|(\d+)-(\d+))\}")


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    block_id: int
    """The one block that answers it."""
    fact_id: str
    language: Language
    half: Half
    author: Author = "first"
    new_fact: bool = False
    """Of a fact that the second author added."""


@dataclass(frozen=True, slots=True)
class ParaphraseSet:
    blocks: dict[int, str]
    questions: tuple[Question, ...]

    def of(self, half: Half, author: Author | None = None) -> tuple[Question, ...]:
        return tuple(q for q in self.questions if q.half == half and author in (None, q.author))

    def overlap(self, question: Question) -> float:
        """Share of the question's content terms that its block holds."""
        asked = set(terms(question.text))
        return len(asked & set(terms(self.blocks[question.block_id]))) / max(1, len(asked))


@dataclass(frozen=True, slots=True)
class _Fact:
    id: str
    language: Language
    template: str
    asked: tuple[tuple[Author, str], ...]
    half: Half
    is_new: bool


def paraphrase_set(seed: int = 0, num_distractors: int = 400) -> ParaphraseSet:
    """The same seed gives the same set. Facts and distractors lie mixed, as blocks of a context."""
    draw = random.Random(seed)
    facts = [fact for language in LANGUAGES for fact in _facts(language)]
    distractors = _read("distractors.toml")
    texts: list[tuple[str | None, str]] = [
        (fact.id, _fill(fact.template, fact.language, draw)) for fact in facts
    ]
    seen = {text for _, text in texts}
    while len(seen) < len(facts) + num_distractors:
        language = draw.choice(LANGUAGES)
        text = _fill(draw.choice(distractors[language]), language, draw)
        if text not in seen:
            seen.add(text)
            texts.append((None, text))
    draw.shuffle(texts)
    places = {fact_id: place for place, (fact_id, _) in enumerate(texts) if fact_id is not None}
    questions = [
        Question(
            text=draw.choice(OPENINGS[fact.language]) + text,
            block_id=places[fact.id],
            fact_id=fact.id,
            language=fact.language,
            half=fact.half,
            author=author,
            new_fact=fact.is_new,
        )
        for fact in facts
        for author, text in fact.asked
    ]
    return ParaphraseSet({place: text for place, (_, text) in enumerate(texts)}, tuple(questions))


def _facts(language: Language) -> list[_Fact]:
    first, second = _read(f"paraphrases_{language}.toml"), _read(f"second_author_{language}.toml")
    facts: list[_Fact] = []
    for fact in first["fact"]:
        asked = _by("first", fact["questions"]) + _by("second", second["questions"][fact["id"]])
        half = _half(fact["id"])
        facts.append(_Fact(fact["id"], language, fact["block"], asked, half, is_new=False))
    for fact in second["fact"]:
        asked = _by("second", fact["questions"])
        facts.append(_Fact(fact["id"], language, fact["block"], asked, "test", is_new=True))
    return facts


def _by(author: Author, questions: list[str]) -> tuple[tuple[Author, str], ...]:
    return tuple((author, question) for question in questions)


def _half(fact_id: str) -> Half:
    return "tune" if hashlib.sha256(fact_id.encode()).digest()[0] % 2 else "test"


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((DATA / name).read_text("utf-8"))


def _fill(template: str, language: Language, draw: random.Random) -> str:
    def slot(match: re.Match[str]) -> str:
        if match[1] == "party":
            return draw.choice(PARTIES[language])
        return str(draw.randint(int(match[2]), int(match[3])))

    return _SLOT.sub(slot, template)
