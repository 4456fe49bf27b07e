"""The oracle's work with another answer, or with an artifact emptied: only the right one may pass.

A verifier that finds the answer as a part of the text, compares with a NaN, or asks only whether
nothing is wrong is not seen by attacks that leave the world undone.
"""

from __future__ import annotations

import json
from dataclasses import replace

from sandbox.check.episodes import Played, Stage
from sandbox.check.findings import Step
from sandbox.check.probe import probe_script
from sandbox.check.scripts import Script
from sandbox.check.written import Written
from sandbox.task import TaskSpec

NONSENSE = "parl-unrelated-answer-0815"
WILDCARDS = ("", "{}", "[]", "null", "nan", "NaN", "inf", "true", "*")
HUNDRED = " ".join(str(number) for number in range(1, 101))
EMPTY_VALUES = ("{}", "[]", "NaN", "null", "")

_OVERWRITE = """
import pathlib
for name in {remove!r}:
    try:
        if {delete!r}:
            pathlib.Path(name).unlink()
        else:
            pathlib.Path(name).write_text("")
    except OSError:
        pass
for name in {names!r}:
    pathlib.Path(name).write_text({text!r})
"""


async def try_answers(
    stage: Stage, spec: TaskSpec, oracle: Script, sprays: dict[str, str], step: Step
) -> int:
    """Episodes played. ``sprays``: long answers by name, tried beside the wildcards."""
    played = await _answer(stage, spec, oracle, NONSENSE, "unrelated")
    judged = not played.passed  # else only the world counts, and any answer is fine
    _no_error(played, "an unrelated answer", step)
    count = 1
    if judged:
        wrong = {"1-to-100": HUNDRED, **sprays, **{repr(text): text for text in WILDCARDS}}
        for name, text in wrong.items():
            if _same(text, oracle.final_text):
                continue
            played = await _answer(stage, spec, oracle, text, name)
            count += 1
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
        _no_error(played, f"the oracle's answer with {name}", step)
    return count


async def try_artifacts(
    stage: Stage, spec: TaskSpec, oracle: Script, written: Written, step: Step
) -> int:
    """Each JSON artifact of the oracle emptied; then all of them, with the inputs emptied too."""
    count = 0
    read = []
    for path, value in written.json_artifacts.items():
        played = await _overwritten(stage, spec, oracle, [path], NONSENSE, [])
        count += 1
        if played.passed:
            continue  # the verifier does not look at it
        read.append(path)
        for text in EMPTY_VALUES:
            if _same(text, json.dumps(value)):
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


async def _without_inputs(
    stage: Stage, spec: TaskSpec, oracle: Script, written: Written, read: list[str], step: Step
) -> int:
    """What the verifier computes from files that the agent can empty is not the right answer."""
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
    code = _OVERWRITE.format(names=names, text=text, remove=remove, delete=delete)
    probe = probe_script("overwrite", code)
    return await stage.play(
        spec, Script("oracle-overwritten", (*oracle.rounds, *probe.rounds), oracle.final_text)
    )


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
    except ValueError:
        return False


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
