"""Is the solution, the verifier or the answer readable from inside the agent's box?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sandbox.check.answer_text import answer_in_text
from sandbox.check.box_walk import MAX_BOX_CHARS, MAX_FILE_BYTES, walk_code, walked
from sandbox.check.episodes import Stage
from sandbox.check.findings import Step
from sandbox.check.lint_image import copy_of
from sandbox.check.probe import probe_script
from sandbox.check.reachable import SolutionCode, shared_code, solution_code, try_programs
from sandbox.check.reads import decoded_calls
from sandbox.check.scripts import SHELL_ANSWER
from sandbox.check.subject import Case, Subject
from sandbox.check.told import needed, table_pairs, told_targets
from sandbox.check.values import leaves
from sandbox.check.written import Written
from sandbox.manifest.reading import read_toml
from sandbox.task import TaskSpec

MIN_ANSWER_CHARS = 4
_ANSWER_KEY = re.compile(
    r"(?i)^(.*_)?(answers?|solutions?|expected\w*|ground_?truth|gold(en)?|oracle|labels?|targets?"
    r"|correct(_\w+)?|reward|secret)$"
)
_ANSWER_FILE = re.compile(
    r"(?i)(solution|solve|oracle|answer|expected|ground_?truth|gold(en)?|verify|grader|reward"
    r"|test[_.]|_test)"
)
_EXPECTED = re.compile(r"(?i)\b(expected|answers?|solution|right result|correct|ground.?truth)\b")
MIN_ARTIFACT_CHARS = 8


async def run_leaks(
    stage: Stage, spec: TaskSpec, case: Case, subject: Subject, written: Written
) -> Step:
    """``spec`` and ``stage`` are those of the probe bundle; ``written``: what the oracle left."""
    step = Step("leaks")
    played = await stage.play(spec, probe_script("leak-probe", walk_code()))
    text = played.observations[0].text if played.observations else ""
    try:
        seen = walked(text)
    except ValueError:
        words = (text or played.start_text)[:200]
        step.add("not-checked", "leaks", f"the box could not be searched: {words}")
        return step
    if seen["num_cut"]:
        step.add(
            "not-checked",
            "leaks",
            f"{seen['num_cut']} files are larger or more than is searched ({MAX_FILE_BYTES:,} "
            f"bytes each, {MAX_BOX_CHARS:,} in all, less what does not shrink): "
            f"{', '.join(seen['cut'])}",
            "warning",
        )
    _files(seen["files"], case, subject, step)
    await try_programs(stage, spec, case.oracle, seen["files"], step)
    await _artifacts(stage, spec, case, seen["files"], written, step)
    _final_text(seen["files"], case, written, step)
    _environment(seen["environ"], case, step)
    _data(case, step)
    _together(case, written, step)
    told_targets(case, written, step)
    _instruction(case, step)
    answer_in_text(case, written, step)
    _told(case, subject, seen["files"], step)
    step.note = f"{len(seen['files'])} files readable in the box"
    step.data["files"] = sorted(seen["files"])[:100]
    return step


def _files(files: dict[str, str], case: Case, subject: Subject, step: Step) -> None:
    secrets = {"tests/verify.py": subject.bundle.verify_source}
    if subject.folder is not None:
        for part in ("solution", "tests"):
            for path in sorted((subject.folder / part).rglob("*")):
                name = path.relative_to(subject.folder).as_posix()
                text = _text_of(path, name, step)
                if text is not None:
                    secrets[name] = text
    code = solution_code(subject.folder) if subject.folder is not None else SolutionCode()
    answer = case.oracle.final_text.strip()
    for name, text in files.items():
        copied = copy_of(text, secrets)
        shared = shared_code(name, text, code) if copied is None else None
        if copied is not None:
            step.add(
                "oracle-readable",
                f"box: {name}",
                f"is (nearly) {copied}, readable by the agent; keep it out of environment/",
            )
        elif shared is not None:
            step.add(
                "oracle-readable",
                f"box: {name}",
                f"holds most of the code of {shared} with other names or constants, readable by "
                "the agent; keep it out of environment/",
            )
        elif (
            _ANSWER_FILE.search(name.rsplit("/", 1)[-1])
            and len(answer) >= MIN_ANSWER_CHARS
            and _contains(text, answer)
        ):
            step.add("answer-readable", f"box: {name}", "holds the answer under a telling name")


async def _artifacts(
    stage: Stage, spec: TaskSpec, case: Case, files: dict[str, str], written: Written, step: Step
) -> None:
    """What the oracle must write lies in the box already, as such or as pairs in other words; a
    file without which it does not pass is a source of the task and no leak."""
    for artifact, content in written.artifacts.items():
        wanted = content.decode("utf-8", "replace").strip()
        if artifact.startswith(".") or len(wanted) < MIN_ARTIFACT_CHARS:
            continue
        value = _json(wanted)
        pairs = _pairs(value if value is not None else table_pairs(artifact, wanted))
        for name, text in files.items():
            if name == artifact:
                continue
            if text.strip() == wanted or (value and _json(text) == value) or (
                len(wanted) >= 2 * MIN_ARTIFACT_CHARS and wanted in text
            ):  # fmt: skip
                step.add("answer-readable", f"box: {name}",
                         f"holds what the solution writes to {artifact}; keep it out of "
                         "environment/")  # fmt: skip
            elif len(pairs) > 1 and all(pair.search(text) for pair in pairs):
                if not _EXPECTED.search(text) and await needed(stage, spec, case.oracle, name):
                    continue
                step.add(
                    "answer-readable",
                    f"box: {name}",
                    f"tells every value that the solution writes to {artifact}, and the solution "
                    "does without this file; keep it out of environment/",
                )


def _pairs(value: Any) -> list[re.Pattern[str]]:
    """``key: value`` with any punctuation between, for each entry of a flat JSON object."""
    if not isinstance(value, dict) or any(isinstance(v, dict | list) for v in value.values()):
        return []
    return [
        re.compile(rf"(?<!\w){re.escape(str(key))}[^\w\n]{{1,6}}{re.escape(str(inner))}(?!\w)")
        for key, inner in value.items()
    ]


def _json(text: str) -> Any:
    """The object or list that ``text`` is, or None."""
    try:
        value = json.loads(text)
    except ValueError:  # no JSON: compared as text
        return None
    return value if isinstance(value, dict | list) else None


def _final_text(files: dict[str, str], case: Case, written: Written, step: Step) -> None:
    """The answer in any file, unless the task's tools say it anyway or nobody reads it."""
    answer = case.oracle.final_text.strip()
    told = any(_contains(text, answer) for text in written.texts)
    if len(answer) < MIN_ANSWER_CHARS or told or answer == SHELL_ANSWER:
        return
    for name, text in files.items():
        if _contains(text, answer):
            step.add("answer-readable", f"box: {name}",
                     f"holds the answer {answer[:40]!r}, which no call of the solution reads; "
                     "check that it is there on purpose", "warning")  # fmt: skip


def _environment(environ: dict[str, str], case: Case, step: Step) -> None:
    answer = case.oracle.final_text.strip()
    for name, value in environ.items():
        if _ANSWER_KEY.match(name) or (len(answer) >= MIN_ANSWER_CHARS and answer == value.strip()):
            step.add("answer-readable", f"box: ${name}", "an environment variable tells the answer")


def _data(case: Case, step: Step) -> None:
    """Keys of environment/data.json that say what they are, or repeat the verifier's answers."""
    private = dict(_leaves(case.spec.verifier.data, ""))
    answers = {
        json.dumps(value)
        for key, value in private.items()
        if _ANSWER_KEY.match(key.rsplit(".", 1)[-1])
    }
    # whole tables under such a name are answers whatever tests/data.json calls them
    tables = [case.spec.verifier.data, *private.values()]
    answers |= {json.dumps(value) for value in tables if isinstance(value, dict | list) and value}
    final = case.oracle.final_text.strip()
    for key, value in _leaves(case.spec.environment.data, ""):
        if key.startswith("files.") or not _ANSWER_KEY.match(key.rsplit(".", 1)[-1]):
            continue
        if json.dumps(value) in answers or str(value).strip() == final:
            step.add(
                "answer-readable",
                f"environment/data.json: {key}",
                "holds the answer in the agent's data; keep it in tests/data.json",
            )
        elif key.count(".") == 0:
            step.add(
                "answer-readable",
                f"environment/data.json: {key}",
                "is named like an answer; rename it or move it to tests/data.json",
                "warning",
            )


def _together(case: Case, written: Written, step: Step) -> None:
    """One small part of the agent's data holds the answer and all that the solution acts on: no
    chance, and no name is needed to find it."""
    answer = case.oracle.final_text.strip()
    acted = {
        str(value)
        for name, arguments in decoded_calls(case)
        for value in arguments.values()
        if name in {tool.name for tool in case.spec.tools if tool.effect != "read"}
        and isinstance(value, str | int | float)
    }
    wanted = acted | {answer}
    if not acted or len(wanted) < 3 or any(_contains(text, answer) for text in written.texts):
        return
    for path, part in _parts(case.spec.environment.data, "environment/data.json: "):
        held = [str(leaf.value) for leaf in leaves(part) if leaf.place[-1:] != ("*",)]
        if wanted <= set(held) and len(held) <= 2 * len(wanted):
            step.add(
                "answer-readable",
                path.rstrip(": "),
                f"holds the answer {answer[:40]!r} beside all that the solution acts on, and "
                "no call of the solution reads it; keep it in tests/data.json",
            )


def _parts(value: Any, path: str) -> list[tuple[str, Any]]:
    """Every object and list in nested data, files left out."""
    inner = value.items() if isinstance(value, dict) else (
        enumerate(value) if isinstance(value, list) else [])  # fmt: skip
    found = [(path, value)] if isinstance(value, dict | list) else []
    for key, part in inner:
        if key != "files":
            found += _parts(part, f"{path}.{key}".replace(": .", ": "))
    return found


def _instruction(case: Case, step: Step) -> None:
    answer = case.oracle.final_text.strip()
    if len(answer) >= MIN_ANSWER_CHARS and _contains(case.spec.instruction, answer):
        severity = "error" if re.search(r"\d", answer) or len(answer) > 12 else "warning"
        step.add("answer-in-instruction", "instruction.md", f"says the answer {answer[:60]!r}",
                 severity)  # fmt: skip
    for tool in case.spec.tools:
        if len(answer) >= MIN_ANSWER_CHARS and _contains(tool.description, answer):
            step.add(
                "answer-in-instruction", f"tool {tool.name}", "its description says the answer"
            )


def _told(case: Case, subject: Subject, files: dict[str, str], step: Step) -> None:
    """ "the answer is X" in anything the agent may read, and variables named like an answer."""
    answer = case.oracle.final_text.strip()
    texts = {"environment/data.json": json.dumps(case.spec.environment.data, ensure_ascii=False)}
    texts["instruction.md"] = case.spec.instruction
    texts |= {f"box: {name}": text for name, text in files.items() if name.endswith(" (sqlite)")}
    if subject.folder is not None:
        for part in ("environment", "tools", "cassettes"):
            for path in sorted((subject.folder / part).rglob("*")):
                name = path.relative_to(subject.folder).as_posix()
                text = _text_of(path, name, step)
                if text is not None:
                    texts[name] = text
        environment = read_toml(subject.folder / "task.toml").get("environment", {})
        for name in environment.get("env", {}):
            if _ANSWER_KEY.match(name):
                step.add("answer-readable", f"task.toml: environment.env.{name}",
                         "an environment variable tells the answer")  # fmt: skip
    pattern = re.compile(
        r"(?i)\b(?:answer|solution|expected|ground.?truth)(?:\s+value)?[\"']?\s*(?:is|:|=|are)\s*"
        rf"[\"'`]?{re.escape(answer)}(?!\w)"
    )
    for name, text in texts.items():
        if answer and pattern.search(text):
            step.add("answer-readable", name, "says what the answer is")
    for key, value in case.spec.verifier.data.items():
        if str(value) == answer and case.spec.environment.data.get(key) == value:
            step.add("answer-readable", f"environment/data.json: {key}",
                     "is the answer, under the key that tests/data.json has for it")  # fmt: skip


def _text_of(path: Path, name: str, step: Step) -> str | None:
    """Text of a file of the task; None for folders, and for a file too large, which is told."""
    if not path.is_file():
        return None
    if path.stat().st_size >= MAX_FILE_BYTES:
        step.add("not-checked", name, f"is larger than {MAX_FILE_BYTES >> 20} MiB and was not "
                 "compared with what the agent can read", "warning")  # fmt: skip
        return None
    return path.read_text("utf-8", "replace")


def _contains(text: str, answer: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


def _leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [
            leaf
            for key, inner in value.items()
            for leaf in [(f"{path}.{key}".lstrip("."), inner), *_leaves(inner, f"{path}.{key}")]
        ]
    return []
