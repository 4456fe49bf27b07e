"""The oracle's work with another answer, or with an artifact emptied: only the right one may pass.

A verifier that finds the answer as a part of the text, compares with a NaN, or asks only whether
nothing is wrong is not seen by attacks that leave the world undone.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from sandbox.check.answers import Mutant, number_mutants, paid, try_near_answers
from sandbox.check.episodes import Played, Stage
from sandbox.check.findings import Step
from sandbox.check.numbers import no_numbers, try_no_numbers
from sandbox.check.partial import Variant, artifact_variants, judge, tables, try_variants
from sandbox.check.scripts import Script, has_shell
from sandbox.check.values import TOLERANT, other_answer
from sandbox.check.written import OVERWRITTEN, Written, overwriting
from sandbox.task import TaskSpec

_SPACES = ("a space after it", "a newline after it")
_OWN_WORDS = re.compile(r"(?i)\b(short|brief|confirm\w*|summar\w+|message|sentence|words)\b")
"""What is asked for is in the agent's own words."""
NONSENSE = "parl-unrelated-answer-0815"
WILDCARDS = ("", "{}", "[]", "null", "nan", "NaN", "inf", "-inf", "1e999",
             " ", "true", "*")  # fmt: skip
HUNDRED = " ".join(str(number) for number in range(1, 101))
EMPTY_VALUES = ("{}", "[]", "NaN", "null", "")


async def try_answers(
    stage: Stage,
    spec: TaskSpec,
    oracle: Script,
    sprays: dict[str, str],
    written: Written,
    step: Step,
) -> int:
    """Episodes played. ``sprays``: long answers by name, tried beside the wildcards. Where an
    unrelated answer gets the solution's score, only the world counts; where it gets less and
    passes, half a result passes."""
    played = await _answer(stage, spec, oracle, NONSENSE, "unrelated")
    _steady(played, written, step)
    _no_error(played, "an unrelated answer", step)
    count = 1
    if played.passed and (played.verdict.correctness or 0.0) < written.correctness:
        script = replace(oracle, name="oracle-unrelated", final_text=NONSENSE)
        variant = Variant("partial-passes", "with an unrelated answer", script)
        judge(variant, played, written, step)
    if played.passed and (played.verdict.correctness or 0.0) >= written.correctness:
        _asked_for(spec, oracle, step)
    if not played.passed:
        count += await _both_answers(stage, spec, oracle, step)
        count += await try_near_answers(stage, spec, oracle, written, step)
        wrong = {"1-to-100": HUNDRED, **sprays, **{repr(text): text for text in WILDCARDS}}
        for name, text in wrong.items():
            if _same(text, oracle.final_text):
                continue
            played = await _answer(stage, spec, oracle, text, name)
            count += 1
            _steady(played, written, step)
            _no_error(played, f"the answer {text[:20]!r}", step)
            if played.passed:
                step.add(
                    "answer-spray",
                    f"tamper: oracle with answer {name}",
                    f"the oracle's world with the answer {text[:40]!r} scored "
                    f"{played.verdict.correctness}, which passes; compare the whole answer, and "
                    "refuse what is no finite number",
                )
    for name, text in _rewordings(oracle.final_text).items():
        played = await _answer(stage, spec, oracle, text, name)
        count += 1
        _steady(played, written, step)
        _no_error(played, f"the oracle's answer with {name}", step)
        if name in _SPACES and not played.passed and not has_shell(spec):
            step.add(
                "format-sensitive",
                f"tamper: oracle's answer with {name}",
                f"scored {played.verdict.correctness}, though the answer is right; strip it before "
                "it is compared",
                "warning",
            )
    return count


def _asked_for(spec: TaskSpec, oracle: Script, step: Step) -> None:
    """Any answer passes: then the instruction may not ask for a certain one."""
    answer = oracle.final_text.strip()
    asked = re.search(r"(?i)\b(answer|reply|respond)\b[^.]{0,20}\b(with|by)\b", spec.instruction)
    if asked and answer and answer.casefold() not in spec.instruction.casefold() and (
        not has_shell(spec) and answer.casefold() not in ("done", "ok", "finished")
    ):  # fmt: skip
        exact = re.search(r"\d", answer) is not None or (
            len(answer.split()) <= 3 and not _OWN_WORDS.search(spec.instruction)
        )
        step.add(
            "unchecked-answer",
            "tamper: oracle with an unrelated answer",
            f"the instruction asks for an answer ({asked[0]!r}), but any answer is paid as "
            f"{answer[:40]!r} is; compare it, or do not ask for it",
            "error" if exact else "warning",
        )


async def _both_answers(stage: Stage, spec: TaskSpec, oracle: Script, step: Step) -> int:
    """The right answer and a wrong one, in both orders: a verifier that reads the first or the
    last may take one of them, but never both."""
    answer, other = oracle.final_text.strip(), other_answer(oracle.final_text.strip())
    texts = (f"{answer}\n{other}", f"{other}\n{answer}")
    runs = [await _answer(stage, spec, oracle, text, "two-answers") for text in texts]
    if answer and all(played.passed for played in runs):
        step.add(
            "answer-spray",
            "tamper: oracle with two answers",
            f"{texts[0][:60]!r} and {texts[1][:60]!r} both pass; compare the whole answer",
        )
    return len(runs)


def _steady(played: Played, written: Written, step: Step) -> None:
    """The solution's calls go as they went before: each of these episodes plays them again."""
    errors = tuple(seen.error for seen in played.observations[: len(written.errors)])
    told = any(finding.rule == "flaky" for finding in step.findings)
    if written.problem is None and errors != written.errors and not told:
        failed = next((seen.text for seen in played.observations if seen.error), "none failed")
        step.add(
            "flaky",
            f"tamper: {played.agent}"[:80],
            f"the solution's own calls do not always succeed: {failed[:160]}",
        )


async def try_artifacts(
    stage: Stage, spec: TaskSpec, oracle: Script, written: Written, step: Step
) -> int:
    """Each JSON artifact of the oracle emptied, or with an entry less, more or wrong; then all of
    them, with the inputs emptied too."""
    count = 0
    read: list[str] = []
    values = {**written.json_artifacts, **dict.fromkeys([*tables(written), *written.texts_made])}
    for path, value in values.items():
        played = await _overwritten(stage, spec, oracle, [path], NONSENSE, [])
        count += 1
        said = played.observations[-1].text.strip()
        if said != OVERWRITTEN:
            step.add("not-checked", f"tamper: {path}", f"could not be written over: {said[:160]}",
                     "warning")  # fmt: skip
            continue
        if played.passed:
            continue  # the verifier does not look at it
        read.append(path)
        if path in written.created or has_shell(spec):  # else a book that only tools can write
            edits = artifact_variants(spec, oracle, written, [path])
            count += await try_variants(stage, spec, edits, written, step)
            count += await _no_numbers(stage, spec, oracle, written, path, step)
        count += await _near_texts(stage, spec, oracle, written, path, step)
        for text in EMPTY_VALUES if value is not None else ("",):
            if value is not None and _same(text, json.dumps(value)):
                continue
            played = await _overwritten(stage, spec, oracle, [path], text, [])
            count += 1
            if played.passed:
                step.add(
                    "empty-passes",
                    f"tamper: {path} = {text or 'nothing'}",
                    f"scored {played.verdict.correctness}, which passes, with {text or 'nothing'} "
                    "in place of the oracle's content; ask for everything that must be there",
                )
    return count + await _without_inputs(stage, spec, oracle, written, read, step)


async def _no_numbers(
    stage: Stage, spec: TaskSpec, oracle: Script, written: Written, path: str, step: Step
) -> int:
    text = written.artifacts[path].decode("utf-8", "replace")

    async def play(changed: str) -> Played:
        return await _overwritten(stage, spec, oracle, [path], changed, [])

    variants = no_numbers(text, path in tables(written))
    return await try_no_numbers(variants, path, play, step)


async def _near_texts(
    stage: Stage, spec: TaskSpec, oracle: Script, written: Written, path: str, step: Step
) -> int:
    """A file of one line as an answer: nearly right numbers."""
    text = written.artifacts[path].decode("utf-8", "replace").strip()
    if path not in written.texts_made or "\n" in text:
        return 0
    tolerant = TOLERANT.search(spec.instruction) is not None
    wrong: list[Mutant] = [each for each in number_mutants(text) if not (each.told and tolerant)]
    for mutant in wrong:
        played = await _overwritten(stage, spec, oracle, [path], mutant.text + "\n", [])
        paid(played, mutant, f"tamper: {path} with {mutant.what}", written, step)
    return len(wrong)


async def _without_inputs(
    stage: Stage, spec: TaskSpec, oracle: Script, written: Written, read: list[str], step: Step
) -> int:
    """What the verifier computes from files that the agent can empty is not the right answer."""
    read = [path for path in read if path in written.json_artifacts]
    names = read or [path for path, content in written.artifacts.items() if _is_text(content)][:4]
    # a world may keep its own book in a hidden file: without it there is nothing to judge
    inputs = [name for name in written.inputs if not name.startswith((".", "tests/", "solution/"))]
    if not names or not inputs or written.removed:
        return 0
    count = 0
    for text in ("{}", "[]", "0", ""):
        if any(_same(text, written.artifacts[name].decode("utf-8", "replace")) for name in names):
            continue
        for delete in (True, False):
            # an input that cannot be emptied stays: the agent could not empty it either
            played = await _overwritten(stage, spec, oracle, names, text, inputs, delete)
            alone = played.passed and await _overwritten(stage, spec, oracle, names, text, [])
            count += 1
            if alone and not alone.passed:
                how = "deleted" if delete else "emptied"
                step.add(
                    "verifier-trusts-agent",
                    f"tamper: {how} inputs",
                    f"with the world's files {how} and {text or 'nothing'} in "
                    f"{', '.join(names)[:80]}, the task passes: the verifier computes the answer "
                    "from files that the agent can write; keep its own copy in tests/",
                )
    return count


async def _overwritten(
    stage: Stage,
    spec: TaskSpec,
    oracle: Script,
    names: list[str],
    text: str,
    remove: list[str],
    delete: bool = True,
) -> Played:
    script = overwriting("oracle-overwritten", oracle, names, text, remove, delete)
    return await stage.play(spec, script)


async def _answer(stage: Stage, spec: TaskSpec, oracle: Script, text: str, name: str) -> Played:
    return await stage.play(spec, replace(oracle, name=f"oracle-{name}", final_text=text))


def _rewordings(answer: str) -> dict[str, str]:
    """The right answer as models write it; a verifier may refuse it, but must say so."""
    return {
        "a space after it": answer + " ",
        "a newline after it": answer + "\n",
        "'Answer: ' before it": f"Answer: {answer}",
    }


def _no_error(played: Played, what: str, step: Step) -> None:
    if played.verdict.error is not None:
        step.add(
            "verifier-error",
            f"tamper: {played.agent}"[:80],
            f"no verdict for the oracle's world and {what} ({played.verdict.error[:160]}); every "
            "answer must get a number from 0 to 1",
        )


def _same(text: str, right: str) -> bool:
    """Equal as text, as a number or as JSON."""
    text, right = text.strip().casefold(), right.strip().casefold()
    if text == right:
        return True
    try:
        return json.loads(text) == json.loads(right)
    except ValueError:  # one is no JSON, and as texts they differ
        return False


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:  # the question itself
        return False
    return True
