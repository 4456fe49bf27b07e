"""Answers that are nearly right: the number beside the right one, a thing whose name is alike, a
piece of the answer, the bare guess. None may be paid; and what a model writes may not depend on
invisible characters or on the sixteenth digit.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from sandbox.check.episodes import Played, Stage
from sandbox.check.findings import Severity, Step
from sandbox.check.numbers import FEW_WORDS, no_numbers, try_no_numbers
from sandbox.check.partial import NEARLY, edited_json
from sandbox.check.scripts import SHELL_ANSWER, Script
from sandbox.check.values import TOLERANT, leaves, siblings
from sandbox.check.written import Written
from sandbox.session import RawCall
from sandbox.task import TaskSpec

_NUMBER = re.compile(r"(?<![\w.,\u2212-])([-+\u2212]?\d[\d,]*(?:\.\d+)?)(?![\w,-]|\.\d)")
_FEW = 5
"""So few offered answers are guessed often enough to learn nothing but guessing."""
_YES_NO = frozenset({"yes", "no", "true", "false", "是", "否", "对", "错"})
_WORD = re.compile(r"[\w-]+")
_ENDS = " \t\r\n.!?,;:。！？"
_SENTENCE = 4
"""Words from which on an answer is a sentence that states values."""
_LIST_SPLIT = re.compile(r"\s*(?:[,;/|、，；]|\bor\b|\band\b|或者?|还是|\n\s*[-*\u2022])\s*")
_LONG_DECIMALS = 7
_ROUND_TO = 6


@dataclass(frozen=True, slots=True)
class Mutant:
    """``text``: a wrong answer. ``told``: not wrong where the instruction states a tolerance."""

    what: str
    text: str
    told: bool = False
    severity: Severity = "error"


def number_mutants(answer: str) -> Iterator[Mutant]:
    """The last number of an answer moved by its last digit and by one percent, with another sign,
    a digit more and a digit less."""
    found = list(_NUMBER.finditer(answer))
    if not found:
        return
    match = found[-1]
    written = match[1]
    value = _decimal(written)
    if value is None:
        return
    decimals = len(written.partition(".")[2])
    unit = Decimal(1).scaleb(-decimals)

    def text(changed: Decimal) -> str:
        shown = f"{changed:,f}" if "," in written else f"{changed:f}"
        return answer[: match.start(1)] + shown + answer[match.end(1) :]

    if len(written.strip("-+\u2212")) <= 9:
        near: Severity = "error" if decimals == 0 else "warning"
        yield Mutant(f"{value + unit} for {value}", text(value + unit), True, near)
        yield Mutant(f"{value - unit} for {value}", text(value - unit), True, near)
    for factor in (Decimal("1.01"), Decimal("0.99")):
        changed = (value * factor).quantize(unit)
        if abs(changed - value) > unit:
            yield Mutant(f"{changed} for {value}", text(changed), True)
    if value != 0:
        yield Mutant(f"{-value} for {value}", text(-value))
    if decimals == 0 and value != 0:
        yield Mutant(f"{value}0 for {value}", text(value * 10))
        digits = written.lstrip("-+\u2212").replace(",", "")
        yield Mutant(f"1{digits} for {value}", text(Decimal("1" + digits)))
        if len(digits) > 2:
            yield Mutant(f"{digits[:-1]} for {value}", text(Decimal(digits[:-1])))


def text_mutants(answer: str, data: Any, texts: Sequence[str]) -> Iterator[Mutant]:
    """Pieces of a word, and other things of the world that are written nearly alike."""
    if len(answer) < 2 or "\n" in answer or len(answer) > 200:
        return
    pointless = re.sub(r"(?<=[^\W_])\.(?=[^\W_])", "x", answer)
    if pointless != answer:
        yield Mutant("another character for a point", pointless)
    words = [str(leaf.value) for leaf in leaves(data) if isinstance(leaf.value, str)]
    words += [word for text in texts for word in re.findall(r"[\w][\w.:/-]{0,60}", text)]
    folded = _folded(answer)
    alike = [word for word in dict.fromkeys(words) if word != answer and _folded(word) == folded]
    yield from (Mutant(f"{word!r} for {answer!r}", word) for word in alike[:3])
    near = [str(other) for other in siblings(answer, data, texts)]
    near = [other for other in near if other.startswith(answer) or answer.startswith(other)]
    yield from (Mutant(f"{other!r} for {answer!r}", other) for other in near[:2])
    if len(answer) > 3 and re.search(r"[^\W\d]", answer):
        yield Mutant("its last character gone", answer.rstrip(_ENDS)[:-1])
        yield Mutant("a letter before it", f"x{answer}")


def _folded(text: str) -> str:
    return re.sub(r"[\W_]", "", unicodedata.normalize("NFKC", text).casefold())


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("\u2212", "-"))
    except InvalidOperation:
        return None


async def try_near_answers(
    stage: Stage, spec: TaskSpec, oracle: Script, written: Written, step: Step
) -> int:
    """Episodes played; for a task whose answer counts."""
    answer = oracle.final_text.strip()
    count = await _guessed(stage, spec, oracle, written, step)
    value = _json(answer)
    if value is not None:
        count += await _json_answers(stage, spec, oracle, written, step)
    else:
        mutants = [*number_mutants(answer), *text_mutants(answer, spec.environment.data,
                                                          written.texts)]  # fmt: skip
        tolerant = TOLERANT.search(spec.instruction) is not None
        for mutant in mutants:
            if (mutant.told and tolerant) or same_values(mutant.text, answer, spec, written.texts):
                continue
            played = await stage.play(
                spec, replace(oracle, name="oracle-near-answer", final_text=mutant.text)
            )
            count += 1
            paid(played, mutant, f"tamper: oracle with {mutant.what}", written, step)

    async def play(text: str) -> Played:
        return await stage.play(spec, replace(oracle, name="oracle-no-number", final_text=text))

    if not _NUMBER.fullmatch(answer):  # alone it is tried beside other short answers
        variants = no_numbers(answer, words=FEW_WORDS)
        count += await try_no_numbers(variants, "oracle's answer", play, step)
    return count


def same_values(text: str, answer: str, spec: TaskSpec, texts: Sequence[str]) -> bool:
    """Whether a text states what ``answer`` states; spaces and punctuation at the end do not count.
    A sentence states its numbers or, without any, its words that come from the world; what is
    written as a whole in the world is a name and no sentence."""
    text, answer = text.strip().rstrip(_ENDS), answer.strip().rstrip(_ENDS)
    if text == answer:
        return True
    known = {str(leaf.value) for leaf in leaves(spec.environment.data)}
    if len(answer.split()) < _SENTENCE or answer in known or any(answer in one for one in texts):
        return False
    if _NUMBER.search(answer):
        return _NUMBER.findall(text) == _NUMBER.findall(answer)
    asked = set(_WORD.findall(spec.instruction.casefold()))
    world = "\n".join([*known, *texts]).casefold()
    facts = set(_WORD.findall(world)) - asked
    values = [word for word in _WORD.findall(answer.casefold()) if word in facts]
    return bool(values) and values == [
        word for word in _WORD.findall(text.casefold()) if word in facts
    ]


def paid(played: Played, mutant: Mutant, where: str, written: Written, step: Step) -> None:
    """A nearly right result that passes is a finding."""
    if not played.passed:
        return
    scored = played.verdict.correctness or 0.0
    lower = NEARLY * written.correctness < scored < written.correctness
    advice = (
        "compare exactly, or say in the instruction how far off it may be"
        if mutant.told
        else "compare the whole of it, as it stands"
    )
    step.add(
        "near-answer-passes",
        where[:200],
        f"scored {scored:g}, which passes, though it is not right; {advice}",
        "warning" if lower else mutant.severity,
    )


async def _json_answers(
    stage: Stage, spec: TaskSpec, oracle: Script, written: Written, step: Step
) -> int:
    """A JSON answer with an entry less, more or wrong, and written with other spaces."""
    count = 0
    for rule, what, text, severity in edited_json(oracle.final_text, spec.instruction):
        played = await stage.play(spec, replace(oracle, name="oracle-json-answer", final_text=text))
        count += 1
        if played.passed and (played.verdict.correctness or 0.0) >= written.correctness:
            step.add(rule, f"tamper: oracle with {what} in its answer",
                     f"scored {played.verdict.correctness:g}, which passes, though the answer is "
                     "wrong", severity)  # fmt: skip
    value = _json(oracle.final_text)
    for text in {json.dumps(value, indent=2), json.dumps(value, separators=(",", ":"))}:
        if text == oracle.final_text.strip():
            continue
        played = await stage.play(spec, replace(oracle, name="oracle-spaced", final_text=text))
        count += 1
        if not same_score(played, written) and not re.search(
            r"(?i)\b(compact|exactly|one line|single line|no spaces|minified)\b", spec.instruction
        ):
            step.add(
                "format-sensitive",
                "tamper: oracle with other spaces in its JSON",
                f"the same value written as {text[:60]!r} scores {played.verdict.correctness}; "
                "parse the answer and compare values",
            )
            break
    return count


async def _guessed(
    stage: Stage, spec: TaskSpec, oracle: Script, written: Written, step: Step
) -> int:
    """One of a few answers that the instruction or a tool offers, without a single call."""
    answer = oracle.final_text.strip()
    offered = offered_answers(answer, spec)
    if not 0 < offered <= 2 * _FEW or not oracle.num_calls:
        return 0
    played = await stage.play(spec, Script("guess", final_text=oracle.final_text))
    if played.passed:
        step.add(
            "guessable",
            "tamper: the answer without any call",
            f"{answer[:40]!r} is one of {offered} answers that are offered, and passes without a "
            f"look at the world: a policy is paid once in {offered} times for guessing; ask for "
            "what cannot be guessed (a number, a name, a change of the world)",
            "error" if offered <= _FEW else "warning",
        )
    return 1


def offered_answers(answer: str, spec: TaskSpec) -> int:
    """Of how many answers, told by the instruction or a tool's enumeration, this is one; 0 when it
    is none of such a list."""
    wanted = answer.casefold()
    if wanted in _YES_NO:
        return 2
    sizes = []
    for sentence in re.split(r"(?<=[.?!。？！])\s+|\n\n", spec.instruction):
        pieces = [piece.strip(" \t\n\"'`.:?!。()[]{}") for piece in _LIST_SPLIT.split(sentence)]
        lasts = [piece.casefold() for piece in pieces]
        hits = [
            number
            for number, piece in enumerate(lasts)
            if piece == wanted or piece.endswith(f" {wanted}") or piece.startswith(f"{wanted} ")
        ]
        for hit in hits:
            low = high = hit
            while low > 0 and len(pieces[low].split()) <= 3 and pieces[low - 1]:
                low -= 1
            while high + 1 < len(pieces) and 0 < len(pieces[high + 1].split()) <= 3:
                high += 1
            if high > low:
                sizes.append(high - low + 1)
    for tool in spec.tools:
        for schema in tool.schema.get("properties", {}).values():
            listed = [str(entry).casefold() for entry in schema.get("enum", ())]
            if wanted in listed and len(listed) > 1:
                sizes.append(len(listed))
    return min(sizes, default=0)


async def try_plain_writing(
    stage: Stage, spec: TaskSpec, oracle: Script, written: Written, step: Step
) -> int:
    """The solution as a model writes it: composed characters, plain spaces, no invisible ones, and
    numbers of at most six decimals."""
    count = 0
    plain = Script(
        "oracle-plain-characters",
        tuple(
            tuple(RawCall(call.name_text, _plain(call.arguments_text)) for call in calls)
            for calls in oracle.rounds
        ),
        _plain(oracle.final_text),
    )
    if plain.rounds != oracle.rounds or plain.final_text != oracle.final_text:
        played = await stage.play(spec, plain)
        count += 1
        if not same_score(played, written):
            step.add(
                "look-alike-characters",
                "tamper: oracle in composed characters",
                "the solution does not pass when its text is written in composed characters (NFC) "
                "and plain spaces, as a model writes it; compare normalised text and let the tools "
                "take either",
            )
    rounded = _rounded(oracle.final_text)
    if rounded != oracle.final_text and oracle.final_text != SHELL_ANSWER:
        played = await stage.play(spec, replace(oracle, name="oracle-rounded", final_text=rounded))
        count += 1
        if not same_score(played, written):
            step.add(
                "exact-float",
                "tamper: oracle with a rounded answer",
                f"{rounded[:60]!r} instead of {oracle.final_text.strip()[:60]!r} scores "
                f"{played.verdict.correctness}: no model writes all digits of a float; ask for a "
                "number of decimals and compare with math.isclose",
            )
    return count


def same_score(played: Played, written: Written) -> bool:
    """As the solution itself."""
    return played.passed and (played.verdict.correctness or 0.0) >= written.correctness


def _plain(text: str) -> str:
    """NFC, ordinary spaces, no format characters; escapes of JSON text included."""
    if "\\u" in text:
        value = _json(text)
        text = text if value is None else json.dumps(value, ensure_ascii=False)
    composed = unicodedata.normalize("NFC", text)
    return "".join(
        " " if unicodedata.category(char) == "Zs" else char
        for char in composed
        if unicodedata.category(char) != "Cf"
    )


def _rounded(text: str) -> str:
    return re.sub(
        rf"(?<![\w.])-?\d+\.\d{{{_LONG_DECIMALS},}}(?![\w.])",
        lambda found: f"{round(float(found[0]), _ROUND_TO)}",
        text,
    )


def _json(text: str) -> Any:
    """The object or list that ``text`` is, or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # no JSON: compared as text
        return None
    return value if isinstance(value, dict | list) else None
