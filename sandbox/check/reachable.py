"""A right way that lies in the agent's world: code of the solution under another name, or a program
that makes the result when it is run.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from sandbox.check.episodes import Stage
from sandbox.check.findings import Step
from sandbox.check.scripts import SHELL_TOOL, Script, has_shell
from sandbox.session import RawCall
from sandbox.task import TaskSpec

_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1[^\n]*\n(.*?)\n\s*\2\b", re.S)
_DOC = re.compile(r'("""|\'\'\').*?\1', re.S)
_LEFT_OUT = re.compile(r"(?m)^\s*(?:#|//|import |from |require|use ).*$|(?<=\s)# [^\"'\n]*$")
_TOKEN = re.compile(r'"[^"\n]*"|\'[^\'\n]*\'|\w+|[^\w\s]')
_CODE = (".py", ".sh", ".bash", ".js", ".mjs", ".ts", ".rb", ".pl", ".go", ".rs", ".c", ".r",
         ".lua", ".awk", ".sql", ".jsonl", "")  # fmt: skip
_PROGRAMS = {".py": "python3", ".sh": "bash", ".bash": "bash", ".pl": "perl", ".js": "node"}
_NAMED = re.compile(r"(?<![\w./])/[\w./-]*\w")
GRAM = 6
"""Tokens in a row that are compared; texts in quotes count as one and alike."""
SHARE = 0.55
MIN_SHARED = 24
"""Unrelated programs for one world share at most a fifth of these, a copy with other paths more
than two thirds."""
MAX_PROGRAMS = 4


@dataclass(frozen=True, slots=True)
class SolutionCode:
    """``programs`` by name: here-documents of shell scripts alone, else whole files; ``text``: all
    that the solution holds."""

    programs: dict[str, str] = field(default_factory=dict)
    text: str = ""


def solution_code(folder: Path) -> SolutionCode:
    """Of the files in solution/ that may be code; large ones are no programs."""
    found: dict[str, str] = {}
    texts: list[str] = []
    for path in sorted((folder / "solution").rglob("*")):
        if path.suffix not in _CODE or not path.is_file() or path.stat().st_size > 512 << 10:
            continue
        name = path.relative_to(folder).as_posix()
        texts.append(path.read_text("utf-8", "replace"))
        for text in _scripts(path):
            bodies = [match[3] for match in _HEREDOC.finditer(text)]
            for body in bodies or [text]:
                found[name if name not in found else f"{name} ({len(found)})"] = body
    return SolutionCode(found, "\n".join(texts))


def _scripts(path: Path) -> Iterator[str]:
    """The text; of a calls.jsonl the long arguments."""
    text = path.read_text("utf-8", "replace")
    if path.suffix != ".jsonl":
        yield text
        return
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # told by the step "schema"
            continue
        arguments = entry.get("arguments") if isinstance(entry, dict) else None
        for value in arguments.values() if isinstance(arguments, dict) else ():
            if isinstance(value, str) and "\n" in value:
                yield value


def shared_code(name: str, text: str, code: SolutionCode) -> str | None:
    """The program of the solution most of which stands in ``text`` with other constants, or None.
    A file that the solution names is one that it repairs or calls."""
    grams = _grams(text)
    file = name.rsplit("/", 1)[-1]
    if len(grams) < MIN_SHARED or file in code.text:
        return None
    for title, body in code.programs.items():
        wanted = _grams(body)
        shared = len(wanted & grams)
        if shared >= MIN_SHARED and shared >= SHARE * len(wanted):
            return title
    return None


def _grams(text: str) -> set[tuple[str, ...]]:
    tokens = [
        "''" if token[0] in "\"'" and len(token) > 1 else token
        for token in _TOKEN.findall(_LEFT_OUT.sub("", _DOC.sub(" ", text)))
    ]
    return {tuple(tokens[start : start + GRAM]) for start in range(len(tokens) - GRAM + 1)}


async def try_programs(
    stage: Stage, spec: TaskSpec, oracle: Script, files: dict[str, str], step: Step
) -> None:
    """Programs of a shell world that neither the instruction nor the solution names, run with the
    paths of the instruction and without: one that makes the result is the solution."""
    if not has_shell(spec):
        return
    told = "\n".join([spec.instruction, *(call.arguments_text for calls in oracle.rounds
                                          for call in calls)])  # fmt: skip
    named = [
        path for path in dict.fromkeys(_NAMED.findall(spec.instruction)) if path.count("/") > 1
    ]
    programs = [(name, _interpreter(name, text)) for name, text in files.items()]
    programs = [(name, runner) for name, runner in programs
                if runner and name.rsplit("/", 1)[-1] not in told and " (" not in name]  # fmt: skip
    for name, runner in programs[:MAX_PROGRAMS]:
        for arguments in (named, []) if named else ([],):
            absolute = name if name.startswith("/") else f"/{name}"
            words = " ".join(map(shlex.quote, arguments))
            command = (
                f"f={shlex.quote(absolute)}; [ -f $f ] || f={shlex.quote(name)}; "
                f"timeout 5 {runner} $f {words} </dev/null"
            )
            call = RawCall(SHELL_TOOL, json.dumps({"command": command}))
            script = replace(oracle, name="program-of-the-world", rounds=((call,),))
            played = await stage.play(spec, script)
            if played.passed:
                step.add(
                    "oracle-readable",
                    f"box: {name}",
                    f"`{runner} {absolute} {words}`"[:160].rstrip(" `") + "` alone passes, and "
                    "neither the instruction nor the solution names this program; keep it out of "
                    "environment/",
                )
                break


def _interpreter(name: str, text: str) -> str | None:
    file = name.rsplit("/", 1)[-1]
    suffix = f".{file.rsplit('.', 1)[-1]}" if "." in file[1:] else ""
    if suffix in _PROGRAMS:
        return _PROGRAMS[suffix]
    first = text.partition("\n")[0]
    if not first.startswith("#!"):
        return None
    return next((runner for runner in ("python3", "bash", "perl", "node")
                 if runner in first), "sh" if first.endswith("sh") else None)  # fmt: skip
