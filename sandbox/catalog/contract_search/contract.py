"""A long contract from draws: boilerplate with a few clauses that cost money in it."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from sandbox.catalog.contract_search import words_en, words_zh
from sandbox.catalog.draws import Draws

WORDS: dict[str, ModuleType] = {"en": words_en, "zh": words_zh}
NUM_ARTICLES = {"en": (22, 28), "zh": (40, 48)}
"""Tens of thousands of characters either way: Chinese says the same in a third of them."""
NUM_CLAUSES = (3, 5)
NUM_SENTENCES = {"en": (3, 5), "zh": (4, 5)}


@dataclass(frozen=True, slots=True)
class Penalty:
    """A clause in force. ``breach`` is a key of BREACHES."""

    number: str
    breach: str
    payer: str
    amount: int


@dataclass(frozen=True, slots=True)
class Contract:
    """``clauses``: (number, article title, text) in order."""

    language: str
    clauses: tuple[tuple[str, str, str], ...]
    penalties: tuple[Penalty, ...]


def draw_contract(draws: Draws, language: str) -> Contract:
    """Each breach costs each party at most once; deleted clauses name breaches that cost nobody
    else the same."""
    words = WORDS[language]
    numbers: list[str] = []
    texts: dict[str, list[str]] = {}
    titles: dict[str, str] = {}
    for article in range(1, draws.between(*NUM_ARTICLES[language]) + 1):
        title = draws.choice(sorted(words.TOPICS))
        for clause in range(1, draws.between(*NUM_CLAUSES) + 1):
            number = f"{article}.{clause}"
            numbers.append(number)
            titles[number] = title
            texts[number] = _boilerplate(draws, words, title, NUM_SENTENCES[language])
    money = _Money(draws, words, draws.sample(numbers, 18))
    pairs = [(breach, payer) for breach in sorted(words.BREACHES) for payer in (0, 1)]
    pairs = draws.shuffled(pairs)
    penalties = tuple(money.penalty(texts, *pair) for pair in pairs[:7])
    for breach, payer in pairs[7:9]:
        money.deleted(texts, breach, payer)
    for decoy in draws.shuffled(words.DECOYS):
        money.decoy(texts, decoy)
    joiner = " " if language == "en" else ""
    clauses = tuple((number, titles[number], joiner.join(texts[number])) for number in numbers)
    return Contract(language, clauses, penalties)


def _boilerplate(
    draws: Draws, words: ModuleType, title: str, num_sentences: tuple[int, int]
) -> list[str]:
    """Sentences of the article's topic, completed by general ones."""
    own = list(words.TOPICS[title])
    count = draws.between(*num_sentences)
    parties = draws.shuffled((words.SUPPLIER, words.CUSTOMER))
    return [
        _capital(
            sentence.format(
                a=parties[0], b=parties[1], days=draws.between(3, 60), n=draws.between(2, 36)
            )
        )
        for sentence in draws.sample(own, min(count, len(own)))
    ]


class _Money:
    """Puts sentences with amounts into clauses, each into one of its own."""

    def __init__(self, draws: Draws, words: ModuleType, places: list[str]) -> None:
        self._draws = draws
        self._words = words
        self._places = places
        self._amounts = [500 * step for step in draws.sample(range(4, 180), len(places))]

    def penalty(self, texts: dict[str, list[str]], breach: str, payer: int) -> Penalty:
        """A clause in force."""
        _, templates = self._words.BREACHES[breach]
        number, amount = self._places.pop(), self._amounts.pop()
        self._insert(texts, number, self._draws.choice(templates), payer, amount)
        return Penalty(number, breach, self._party(payer), amount)

    def deleted(self, texts: dict[str, list[str]], breach: str, payer: int) -> None:
        """A clause that was struck out; nothing else stands there."""
        number = self._places.pop()
        texts[number] = []
        name, _ = self._words.BREACHES[breach]
        self._insert(texts, number, self._words.DELETED, payer, self._amounts.pop(), breach=name)

    def decoy(self, texts: dict[str, list[str]], template: str) -> None:
        """An amount that is no penalty."""
        payer = self._draws.below(2)
        self._insert(texts, self._places.pop(), template, payer, self._amounts.pop())

    def _party(self, index: int) -> str:
        return (self._words.SUPPLIER, self._words.CUSTOMER)[index]

    def _insert(
        self,
        texts: dict[str, list[str]],
        number: str,
        template: str,
        payer: int,
        amount: int,
        breach: str = "",
    ) -> None:
        sentence = template.format(
            payer=self._party(payer),
            payee=self._party(1 - payer),
            amount=self._words.amount_text(amount, self._draws.below(3)),
            breach=breach,
            n=self._draws.between(1, 9),
        )
        sentences = texts[number]
        sentences.insert(self._draws.below(len(sentences) + 1), _capital(sentence))


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
