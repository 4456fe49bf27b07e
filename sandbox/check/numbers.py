"""No number where the right one must stand: nan, infinities, nothing, spaces. ``abs(nan - 3) > 1``
is false, so a verifier that looks for what is wrong finds nothing wrong with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.check.episodes import Played
from sandbox.check.findings import Step

_TOKEN = re.compile(r"(?<![\w.,\u2212-])([-+\u2212]?\d[\d,]*(?:\.\d+)?)(?![\w,-]|\.\d)")
_CELL = re.compile(r"(?:(?<=[,;\t])|^)([-+]?\d+(?:\.\d+)?)(?=[,;\t]|$)")
_TEXT_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
_BIG = "parl-1e999"
WORDS = ("nan", "NaN", "inf", "-inf", "1e999", "", " ")
FEW_WORDS = ("nan", "inf", "")
"""For an answer: its episodes may be slow, and one that is a number alone is tried otherwise."""
MAX_PLACES = 6
"""Numbers of a text that are replaced one by one; each costs some five episodes."""


@dataclass(frozen=True, slots=True)
class NoNumber:
    """``text``: without a number at a place; ``control``: with another finite number there."""

    what: str
    text: str
    control: str


def no_numbers(text: str, table: bool = False, words: Sequence[str] = WORDS) -> Iterator[NoNumber]:
    """Every number of a JSON text, of a table's last line or of a short text replaced."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # a table or a text
        value = None
    if isinstance(value, dict | list):
        yield from _in_json(value)
        return
    lines = text.rstrip("\n").splitlines()
    if table and lines:
        head, last = "".join(f"{line}\n" for line in lines[:-1]), lines[-1]
        if last.startswith("{"):
            found = no_numbers(last)
        else:
            found = _in_text(last, list(_CELL.finditer(last)), words)
        for each in found:
            yield NoNumber(each.what, f"{head}{each.text}\n", f"{head}{each.control}\n")
        return
    yield from _in_text(text, list(_TOKEN.finditer(text)), words)


def _in_text(text: str, found: list[re.Match[str]], words: Sequence[str]) -> Iterator[NoNumber]:
    if len(found) > MAX_PLACES:
        found = [*found[: MAX_PLACES // 2], *found[-MAX_PLACES // 2 :]]
    for match in found:
        before, after = text[: match.start(1)], text[match.end(1) :]
        control = before + _other_number(match[1]) + after
        for word in words:
            yield NoNumber(f"{word!r} for {match[1]}", before + word + after, control)


def _in_json(value: Any) -> Iterator[NoNumber]:
    places = list(_places(value))
    if not places:
        return
    for place in places[:MAX_PLACES]:
        control = _put(value, [place], lambda old: _another(old))
        for word in ("nan", "inf", "-inf"):
            changed = _put(value, [place], lambda old, word=word: _like(old, word))
            yield NoNumber(f"{word} for {_shown(place)}", json.dumps(changed), json.dumps(control))
    control = json.dumps(_put(value, places, _another))
    for word in ("nan", _BIG, None, "", " "):
        changed = json.dumps(_put(value, places, lambda old, word=word: word))
        shown = json.dumps(word).replace(f'"{_BIG}"', "1e999")
        yield NoNumber(f"{shown} for every number", changed.replace(f'"{_BIG}"', "1e999"), control)


def _shown(place: tuple[Any, ...]) -> str:
    return ".".join(str(key) for key in place)[:40] or "the number"


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to numbers, also to those that are written as texts."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(inner, (*place, key))
    elif isinstance(value, str):
        if _TEXT_NUMBER.fullmatch(value):
            yield place
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place


def _put(value: Any, places: list[tuple[Any, ...]], change: Callable[[Any], Any]) -> Any:
    copied = json.loads(json.dumps(value))
    for place in places:
        inner = copied
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = change(inner[place[-1]])
    return copied


def _like(old: Any, word: str) -> Any:
    """A float that json.dumps writes as NaN or Infinity; a text where a text stood."""
    return word if isinstance(old, str) else float(word)


def _another(old: Any) -> Any:
    return _other_number(old) if isinstance(old, str) else old * 3 + 7


def _other_number(written: str) -> str:
    """Far away, so that no tolerance covers it."""
    sign = written[: len(written) - len(written.lstrip("-+\u2212"))]
    return f"{sign}9{written[len(sign) :]}"


async def try_no_numbers(
    variants: Iterator[NoNumber], where: str, play: Callable[[str], Awaitable[Played]], step: Step
) -> int:
    """Episodes played; ``play`` puts a text in the place of the right one. Where any other number
    passes as well, the number does not count, which is another finding."""
    count = 0
    free: dict[str, bool] = {}
    for variant in variants:
        played = await play(variant.text)
        count += 1
        if not played.passed:
            continue
        if variant.control not in free:
            free[variant.control] = (await play(variant.control)).passed
            count += 1
        if not free[variant.control]:
            step.add(
                "no-number-passes",
                f"tamper: {where} with {variant.what}"[:200],
                f"scored {played.verdict.correctness:g}, which passes, though it is no number; "
                "refuse what math.isfinite refuses, and ask whether it is right instead of "
                "whether it is wrong (a comparison with nan is always false)",
            )
    return count
